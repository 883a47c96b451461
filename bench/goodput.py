"""How much gets done when sites are killed all the time?

    python -m bench.goodput [--quick] [--sites N] [--seconds S] [--mean S] [--json FILE]

Sites are real `pier-node start` on loopback, with workers that train the smallest model. So that the two cores are not
what limits them, **compute is paced**: an inner step is trained, and the rest of 50 ms is slept. Each site has its own
faults, 15 s apart on average (a seeded Poisson process): SIGKILL to its daemon, launcher and workers; then the same
command is run again at once, as systemd would do. Goodput is the rate at which tokens get into the committed model,
relative to that of the same sites without faults.

With a witness, the sites have a coordinator, which is killed as often as they are: half of them go on with its vote.

Two other policies go through the same faults. They are Pier too, so that only the reaction to a fault differs. The
first waits for everybody: it takes no round without all sites (goodput_hook/). The second restarts the whole job: it
also takes no round without all sites, and each fault kills all of them, as when a collective fails. It notices at
once, and continues from the last round, which is more than most such jobs do.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.goodput_figures import Lives, Outcome, Setting, outcome, undisturbed
from bench.goodput_sites import ENDLESS, INNER_STEPS, Site, running
from bench.tiny_run import tiny_run

WARM = 12
"""Rounds of all sites before faults begin: deadlines are learned by then."""
PATIENCE = 180.0
LOOK = 0.05
GOAL = 0.88
"""Decoupled DiLoCo (arXiv 2604.21428) under heavy failures; plain: 27 %."""


@dataclass(frozen=True)
class Way:
    """What is done about a fault."""

    name: str
    faults: bool = True
    waits: bool = False
    restarts: bool = False
    witness: bool = False


WAYS = (
    Way("no faults", faults=False),
    Way("pier"),
    Way("pier with a witness", witness=True),
    Way("wait for everybody", waits=True),
    Way("restart the whole job", waits=True, restarts=True),
)


def measure(way: Way, setting: Setting) -> Outcome:
    """Run the sites once. Raises RuntimeError: they do not come together."""
    with tempfile.TemporaryDirectory() as folder:
        run = tiny_run(setting.sites, ENDLESS, INNER_STEPS, {"overlap": setting.overlap}, witness=way.witness)
        with running(Path(folder), run, setting.sites, way.waits, way.witness) as victims:
            sites = victims[: setting.sites]
            come_together(sites)
            begun = time.time()
            for fault in setting.faults(len(victims)) if way.faults else []:
                supervise(victims, begun + fault.at)
                strike(victims if way.restarts else [victims[fault.site]])
            supervise(victims, begun + setting.seconds)
        lives = [Lives(site.commits(), site.killed, site.died) for site in sites]
    return outcome(way.name, lives, begun, begun + setting.seconds, os.getloadavg()[0])


def come_together(sites: Sequence[Site]) -> None:
    """Wait for rounds of all sites, before faults begin. Raises RuntimeError: they do not come."""
    deadline = time.monotonic() + PATIENCE
    while sum(commit.members == len(sites) for commit in sites[0].commits()) < WARM:
        if time.monotonic() > deadline:
            raise RuntimeError("\n\n".join(["the sites do not come together", *(site.tail() for site in sites)]))
        time.sleep(LOOK)


def supervise(sites: Sequence[Site], until: float) -> None:
    """Start again what ends by itself, until then; seconds since the epoch."""
    while (left := until - time.time()) > 0:
        for site in sites:
            site.supervise()
        time.sleep(min(left, LOOK))


def strike(sites: Sequence[Site]) -> None:
    """Kill sites, and run their commands again at once."""
    for site in sites:
        site.kill()
    for site in sites:
        site.killed.append(time.time())
        site.start()


def table(outcomes: Sequence[Outcome], setting: Setting) -> Table:
    """The ways; the first has no faults."""
    title = f"{setting.sites} sites for {setting.seconds:g} s, each killed every {setting.mean:g} s on average"
    caption = (
        f"compute is paced; goal {GOAL:.0%}; back: seconds from a kill to the site's next commit; "
        "longest gap: seconds without a commit; load: of the machine, over the last minute"
    )
    shown = Table("way", title=title, caption=caption)
    for heading in ("kills", "tokens/s", "goodput", "rounds", "members", "back (least)", "longest gap", "load"):
        shown.add_column(heading, justify="right")
    for each in outcomes:
        back = f"{each.back:.1f} ({each.quickest:.1f})" if each.kills else ""
        shown.add_row(
            each.way,
            str(each.kills),
            f"{each.rate:.0f}",
            f"{each.goodput(outcomes[0]):.1%}",
            str(each.rounds),
            f"{each.members:.2f}",
            back,
            f"{each.longest:.1f}",
            f"{each.load:.1f}",
        )
    return shown


def expectation(setting: Setting, recovery: float) -> str:
    """What a fault costs at least, for sites that need so long to come back."""
    alone, together = (undisturbed(count, setting.mean, recovery) for count in (1, setting.sites))
    return (
        f"With {recovery:.1f} s to come back, a site is undisturbed {alone:.0%} of the time, "
        f"and all {setting.sites} at once {together:.0%}."
    )


@click.command()
@click.option("--quick", is_flag=True, help="30 s.")
@click.option("--sites", default=3, show_default=True, help="How many.")
@click.option("--seconds", default=180.0, show_default=True, help="Of faults, for each way.")
@click.option("--mean", default=15.0, show_default=True, help="Seconds between two faults of a site, on average.")
@click.option("--seed", default=1, show_default=True, help="Of the faults.")
@click.option("--overlap/--no-overlap", default=True, show_default=True, help="outer.overlap of the run.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(quick: bool, sites: int, seconds: float, mean: float, seed: int, overlap: bool, json_file: Path | None) -> None:
    """Measure goodput under failures."""
    console = Console()
    setting = Setting(sites, 30.0 if quick else seconds, mean, seed, overlap)
    outcomes = []
    for way in WAYS:
        with console.status(way.name):
            outcomes.append(measure(way, setting))
    console.print(table(outcomes, setting))
    console.print(expectation(setting, outcomes[1].quickest))
    if json_file:
        records = [each.record(outcomes[0]) for each in outcomes]
        json_file.write_text(json.dumps({**vars(setting), "outcomes": records}, indent=1) + "\n")


if __name__ == "__main__":
    cli()
