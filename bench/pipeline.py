"""Does an iteration of a pipeline take as long as its planner says? And how much of a pipeline's speed do slow links
leave?

    python -m bench.pipeline [--quick] [--sites N] [--policy NAME] [--json FILE]        (root; Debian: iproute2)
    python -m bench.pipeline --link [--quick] [--json FILE]

Real `pier-node start` daemons with four stages, each in a network namespace with an uplink of 20 to 50 Mbit/s, 5 ms
from the sites of its region and 30 ms from the others (star.py). An activation has 0.8 MB. **Compute is paced**: six
to nine sites share two cores here, so a task is computed, and the rest of its 0.25 s (forward), 0.5 s (backward) or
0.08 s (loss) is slept (pipeline_hook/). Links are then about as busy as sites.

What is predicted is the makespan of the plan that was executed, in the planner's simulator, with the times that the
sites had reported before: each planner leaves both in its folder. What is measured is the time from the first site's
start to the end of the last task. What an iteration takes beyond that is not in the planner's problem, and is shown
beside it. The first iterations are left out: nothing is measured before them.

With --link: four sites with 80 Mbit/s and a round trip of 80 ms between any two, a full pipeline, with each codec; with
10 Mbit/s, also with blocks that write to a quarter of the channels; and the same sites without limits. The whole
iteration is measured, with the step and the round that decides about it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench.pipeline_figures import Iteration, Result, iterations
from bench.pipeline_sites import Trial, Watched, running
from bench.slow_links import has_latency, refuse_without_tools
from pier_node.base.errors import PierError

POLICIES = ("full", "skip", "random")
WARM = 5
"""Iterations that are left out; after five tasks of a kind their times are known."""
COUNT = 6
FORWARD = 0.25
MICROBATCHES = 12
"""Of an iteration over slow links."""
PATIENCE = 600.0
"""Seconds for a policy."""


@dataclass(frozen=True)
class Link:
    """A link between all sites, in Mbit/s and seconds one way, and how activations and gradients travel on it.

    Attributes:
        codec: of activations and of gradients.
        subspace: see Trial.
    """

    name: str
    rate: float
    latency: float
    codec: tuple[str, str]
    subspace: int = 0

    def trial(self) -> Trial:
        """Four sites that compute so fast that, without a codec, a link of 80 Mbit/s is their bottleneck."""
        return Trial(
            paths="full",
            sites=4,
            forward=0.3,
            microbatches=MICROBATCHES,
            codec=self.codec,
            subspace=self.subspace,
            memory=6,
            batch_size=384,
            part=16,
            rates=(self.rate,) * 4,
            latency=lambda *_: self.latency,
        )


LINKS = [
    Link("no limits", 10_000.0, 0.0, ("none", "none")),
    *(
        Link(name, 80.0, 0.04, codec)
        for name, codec in {
            "fp32": ("none", "none"),
            "bf16": ("bf16", "bf16"),
            "int8": ("int8", "int8"),
            "int4, gradients int8": ("int4", "int8"),
            "int4": ("int4", "int4"),
        }.items()
    ),
    Link("int8, 10 Mbit/s", 10.0, 0.04, ("int8", "int8")),
    Link("int8, 10 Mbit/s, 16 of 64 channels", 10.0, 0.04, ("int8", "int8"), subspace=16),
]
LINK_WARM, LINK_COUNT = 2, 3


def measure(trial: Trial, count: int, warm: int = WARM) -> Result:
    """Run sites until so many iterations are known. Raises RuntimeError: they are not done in time."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), trial) as watched:
        deadline = time.monotonic() + PATIENCE
        while watched.steps() <= warm + count and time.monotonic() < deadline:
            watched.look()
        found = known(watched)
        if len(found) < count or watched.steps() <= warm + count:
            raise RuntimeError("\n\n".join(["the sites do not come together", watched.tails()]))
    return Result(trial.paths, trial.sites, found[-count:])


def known(watched: Watched) -> list[Iteration]:
    """The iterations so far."""
    from pier_node.pipeline.planning.simulator import makespan

    events = watched.events()
    predicted = {number: makespan(it.problem, it.plan) for number, it in watched.drawn.items()}
    return iterations(events, predicted)


def table(results: list[Result]) -> Table:
    """A row for each policy."""
    caption = f"medians of seconds; compute is paced; load of the machine: {os.getloadavg()[0]:.1f}"
    shown = Table("sites", "paths", title="Iterations, and what the step adds", caption=caption, box=None)
    for name in ("n", "said", "took", "error", "size", "in 10 %", "mean", "norm", "step", "round", "next"):
        shown.add_column(name, justify="right")
    for it in results:
        both = [f"{it.middle(name):.2f}" for name in ("predicted", "measured")]
        errors = [f"{it.middle('error'):+.1%}", f"{it.typical_error:.1%}", f"{it.within:.0%}"]
        times = [f"{it.middle(name):.2f}" for name in ("average", "total", "step", "commit", "between")]
        shown.add_row(str(it.sites), it.policy, str(len(it.iterations)), *both, *errors, *times)
    return shown


def link_table(results: dict[str, Result]) -> Table:
    """A row for each link; the first one has no limits."""
    caption = f"medians of seconds; compute is paced; load of the machine: {os.getloadavg()[0]:.1f}"
    shown = Table("link", title="Four stages at 80 Mbit/s, 80 ms round trip", caption=caption, box=None)
    for name in ("n", "iteration", "its tasks", "microbatches a second", "of no limits"):
        shown.add_column(name, justify="right")
    free = next(iter(results.values())).middle("whole")
    for name, it in results.items():
        whole = it.middle("whole")
        cells = f"{whole:.2f}", f"{it.middle('measured'):.2f}", f"{MICROBATCHES / whole:.2f}", f"{free / whole:.2f}"
        shown.add_row(name, str(len(it.iterations)), *cells)
    return shown


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Three iterations each.")
@click.option("--sites", default=6, show_default=True, type=click.IntRange(4, 9), help="How many.")
@click.option("--policy", multiple=True, type=click.Choice(POLICIES), help="Only this one; may be repeated.")
@click.option("--link", "links", is_flag=True, help="Slow links and codecs instead of policies.")
@click.option("--only", multiple=True, help="With --link: beside no limits, only this link; may be repeated.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def main(
    quick: bool, sites: int, policy: tuple[str, ...], links: bool, only: tuple[str, ...], json_file: Path | None
) -> None:
    """Measure, and print the table."""
    console, results = Console(), dict[str, Result]()
    if links:
        trials = {it.name: it.trial() for it in LINKS if not only or it.name in ("no limits", *only)}
    else:
        trials = {name: Trial(name, sites, FORWARD, microbatches=sites) for name in policy or POLICIES}
    warm, count = (LINK_WARM, LINK_COUNT) if links else (WARM, COUNT)
    try:
        refuse_without_tools()
        if not has_latency():
            raise PierError("there is no /dev/net/tun here", "modprobe tun")
        for name, trial in trials.items():
            with console.status(name):
                results[name] = measure(trial, 3 if quick else count, warm)
            if json_file:
                records = {name: it.record() for name, it in results.items()}
                json_file.write_text(json.dumps(records if links else [*records.values()], indent=1) + "\n")
    except (PierError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    console.print(link_table(results) if links else table([*results.values()]))


if __name__ == "__main__":
    main()
