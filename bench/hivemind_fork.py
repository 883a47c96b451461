"""What is left when one of three peers is killed in the middle of an exchange: hivemind's averager, and Pier's rounds?

    python -m bench.hivemind_fork [--quick] [--json FILE]

hivemind: three DecentralizedAverager peers average a tensor; one, with all processes that it started, gets SIGKILL
partway through the usual time of the all-reduce. Pier: three daemons train; one kills itself with SIGKILL in the
middle of a round's exchange (--fail-at). Then the two survivors' weights are compared, bit by bit. All peers are
processes on this machine.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from bench.hivemind_fork_peers import VICTIM, Survivor, average_once
from bench.tiny_run import tiny_run
from pier_node.demo.sites import Site, Sites
from pier_node.rounds.folder import EVENTS_FILE, read_events
from pier_node.wire.transport import Transport

ROUNDS, KILLED_IN = 6, 3
STEPS = 5
PATIENCE = 180.0


@dataclass(frozen=True)
class Outcome:
    """One exchange in which a peer was killed.

    Attributes:
        killed: when.
        said: what each survivor reports.
        weights: what each has: mean and digest, or digest.
        same: whether they are the same bits.
    """

    system: str
    killed: str
    said: list[str]
    weights: list[str]
    same: bool


def of_hivemind(length: int, parts: list[float]) -> list[Outcome]:
    """Kill a peer at several parts of the time that an exchange takes when nobody is killed."""
    usual = max(survivor.seconds for survivor in average_once(length, 0.0))
    return [_hivemind_outcome(part, usual, average_once(length, part * usual)) for part in parts]


def _hivemind_outcome(part: float, usual: float, survivors: list[Survivor]) -> Outcome:
    return Outcome(
        "hivemind 1.1.12, DecentralizedAverager",
        f"{part * usual:.2f} s into {usual:.2f} s",
        [survivor.said for survivor in survivors],
        [f"mean {survivor.mean:.4f}, {survivor.digest[:8]}" for survivor in survivors],
        len({survivor.digest for survivor in survivors}) == 1,
    )


def of_pier(transport: Transport) -> Outcome:
    """Kill a site in the middle of a round's exchange."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "run.toml").write_text(tiny_run(3, ROUNDS * STEPS, STEPS))
        sites = Sites(work, 3, transport)
        asyncio.run(_train(sites, work / "run.toml"))
        events = [_of_round(site, KILLED_IN) for number, site in enumerate(sites.all) if number != VICTIM]
    return Outcome(
        f"pier over {transport}",
        f"in the exchange of round {KILLED_IN}",
        [f"round {KILLED_IN} committed, group of {len(event['members'])}" for event in events],
        [event["digest"][:8] for event in events],
        len({event["digest"] for event in events}) == 1,
    )


async def _train(sites: Sites, run: Path) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            way = await sites.invited(run)
            for site in sites.all:
                doom = ["--fail-at", f"{KILLED_IN}:exchanging"] if site is sites.all[VICTIM] else []
                await site.start(*way, *doom)
            for site in sites.all:
                await site.ended()
    finally:
        await sites.stop()


def _of_round(site: Site, number: int) -> dict[str, Any]:
    """What a site wrote down when it committed a round."""
    events = read_events((site.folder / EVENTS_FILE).read_bytes())
    return next(event for event in events if event["round"] == number)


def table(outcomes: list[Outcome]) -> Table:
    """One line for each."""
    shown = Table("system", "one of three killed", title="Two survivors of an exchange")
    for heading in ("they report", "they hold", "same bits"):
        shown.add_column(heading)
    for outcome in outcomes:
        both = ["\n".join(lines) for lines in (outcome.said, outcome.weights)]
        shown.add_row(outcome.system, outcome.killed, *both, "yes" if outcome.same else "[bold red]NO[/]")
    return shown


@click.command()
@click.option("--quick", is_flag=True, help="A smaller tensor, one kill.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write what came out there.")
def cli(quick: bool, json_file: Path | None) -> None:
    """Kill one of three peers in the middle of an exchange, and compare what the others hold."""
    console = Console()
    length, parts = (10_000_000, [0.25] if quick else [0.15, 0.25, 0.35, 0.45])
    with console.status("hivemind's averager"):
        outcomes = of_hivemind(length, parts)
    for transport in get_args(Transport):
        with console.status(f"Pier over {transport}"):
            outcomes.append(of_pier(transport))
    console.print(table(outcomes))
    if json_file:
        json_file.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1) + "\n")


if __name__ == "__main__":
    cli()
