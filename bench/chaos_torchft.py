"""Pier and torchft's DiLoCo under the same faults.

    python -m bench.chaos_torchft --python PYTHON [--sites N] [--seconds S] [--mean S] [--seed N] [--json FILE]

PYTHON is an interpreter with torchft, for instance of an environment with `pip install torchft`. The peers are
processes in network namespaces, as in bench/chaos.py, with the same model, inner steps and links; the faults are those
that both can suffer: kills of all processes, freezes, polite stops, cuts and slow links, at the same times. Nothing
happens to torchft's lighthouse; Pier has no such single point. As in bench/chaos.py, what ends is started again.

torchft is set up as its README and its own tests of DiLoCo do: --min_replicas of a majority, as in Pier, so that no
minority goes on; --join_timeout_ms 10000, --quorum_tick_ms 100; ten seconds for all that a manager waits for
(--timeout; 60 is the default of its code). It leaves checkpoints to the program: each peer keeps every round.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import chaos
from bench.chaos import ENDED, INNER_STEPS, PACE, PATIENCE, RATE, WORK, Setting, Temporary, Trial, events, flaws
from bench.chaos_faults import Line, Victim, cut_off, freeze, kill_all, leave, nothing, slow_line
from bench.goodput_sites import Site
from bench.slow_links import refuse_without_tools, star
from pier_node.base.errors import PierError

BOTH = tuple(kind.__name__.replace("_", " ") for kind in (kill_all, freeze, leave, cut_off, slow_line))
"""Faults of both: torchft has one process a peer, and writes nothing to disks."""
LIGHTHOUSE = 29510


@dataclass(frozen=True)
class Row:
    """A trial of one system.

    Attributes:
        rounds: committed during the faults.
        tokens: in the newest model at the end.
        longest: seconds without a commit, at most, during the faults.
        back: seconds from the last fault's end until all committed rounds together; inf: not within PATIENCE.
        forks: rounds after which peers had different bits, or counts of tokens.
        ended: times that a peer ended by itself.
        other: what else was wrong, in words.
    """

    system: str
    faults: int
    rounds: int
    tokens: int
    longest: float
    back: float
    forks: int
    ended: int
    other: Sequence[str]
    load: float


@contextmanager
def running(work: Path, setting: Setting, python: Path, timeout: float) -> Iterator[list[Victim]]:
    """torchft's peers and its lighthouse, started; killed in the end."""
    folders = [work / f"peer-{number}" for number in range(setting.sites)]
    lines = [Line() for _ in range(setting.sites + 1)]
    least = setting.sites // 2 + 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wan0"}
    with ExitStack() as stack:
        spots = stack.enter_context(
            star([RATE] * len(lines), lambda here, there: max(lines[here].seconds, lines[there].seconds))
        )
        for folder in folders:
            folder.mkdir()
        inside = [["ip", "netns", "exec", spot.namespace] for spot in spots]
        waits = ["--min_replicas", str(least), "--join_timeout_ms", "10000", "--quorum_tick_ms", "100"]
        command = [str(python.with_name("torchft_lighthouse")), *waits, "--bind", f"0.0.0.0:{LIGHTHOUSE}"]
        lighthouse = Site([*inside[-1], *command], work / "lighthouse", environment)
        stack.callback(lighthouse.kill)
        lighthouse.start()
        victims = []
        for spot, within, line, folder in zip(spots, inside, lines, folders, strict=False):
            words = {
                "address": spot.address,
                "lighthouse": f"http://{spots[-1].address}:{LIGHTHOUSE}",
                "least": least,
                "timeout": timeout,
                "steps": INNER_STEPS,
                "pace": PACE,
            }
            options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
            command = [str(python), "-m", "bench.chaos_torchft_peer", str(folder), *options]
            site = Site([*within, *command], folder, environment)
            victims.append(Victim(site, folder, folder.with_suffix(".clock"), line))
            stack.callback(site.kill)
            site.start()
        yield victims


def of_torchft(setting: Setting, python: Path, timeout: float) -> Row:
    """A trial. Raises PierError: it cannot be done here; RuntimeError: the peers do not come together at first."""
    with tempfile.TemporaryDirectory(dir=WORK) as folder, running(Path(folder), setting, python, timeout) as victims:
        trial = Trial(setting, victims, nothing)
        return _row(f"torchft, timeouts of {timeout:g} s", trial, victims)


def of_pier(setting: Setting) -> Row:
    """A trial. Raises as of_torchft."""
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        work = Path(folder)
        with chaos.running(work, setting, Temporary((work / "tmp", work / "shm"))) as victims:
            return _row("Pier", Trial(setting, victims, nothing), victims)


def _row(system: str, trial: Trial, victims: Sequence[Victim]) -> Row:
    other = list[str]()
    try:
        trial.run()
    except RuntimeError as error:
        if not trial.outcome.faults:
            raise
        other = [str(error).splitlines()[0]]
    found, histories = trial.outcome, {victim.folder.name: events(victim) for victim in victims}
    forked = [flaw for flaw in flaws(histories, apart=False) if flaw.startswith("FORKED")]
    other += [it for it in found.problems if "FORKED" not in it and ENDED not in it and "printed" not in it]
    return Row(
        system=system,
        faults=found.faults.total(),
        rounds=found.rounds,
        tokens=max((history[-1]["tokens_in_anchor"] for history in histories.values() if history), default=0),
        longest=found.longest,
        back=math.inf if math.isnan(found.back) else found.back,
        forks=len(forked),
        ended=sum(victim.rude.count(ENDED) for victim in victims),
        other=other,
        load=os.getloadavg()[0],
    )


def table(rows: Sequence[Row], setting: Setting) -> Table:
    """One line for each."""
    title = f"{setting.sites} peers, {setting.seconds:g} s, a fault of each every {setting.mean:g} s on average"
    shown = Table("system", "faults", "rounds", title=title)
    for heading in ("longest without", "together again", "forks", "ended by itself", "other", "load"):
        shown.add_column(heading)
    for row in rows:
        back = f"{row.back:.1f} s" if math.isfinite(row.back) else f"not in {PATIENCE:.0f} s"
        counts = [str(it) for it in (row.forks, row.ended, len(row.other))]
        shown.add_row(
            row.system, str(row.faults), str(row.rounds), f"{row.longest:.1f} s", back, *counts, f"{row.load:.1f}"
        )
    return shown


@click.command()
@click.option("--python", type=click.Path(path_type=Path, exists=True), required=True, help="Interpreter with torchft.")
@click.option("--sites", default=4, show_default=True, help="How many.")
@click.option("--seconds", default=120.0, show_default=True, help="Of faults.")
@click.option("--mean", default=15.0, show_default=True, help="Seconds between two faults of a peer, on average.")
@click.option("--seed", default=1, show_default=True, help="Of the faults.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds, of torchft's managers.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(python: Path, timeout: float, json_file: Path | None, **options: Any) -> None:
    """Let the same faults rain on both."""
    setting, console = Setting(**options, overlap=False, run="diloco", only=BOTH), Console()
    try:
        refuse_without_tools()
        with console.status("torchft"):
            rows = [of_torchft(setting, python, timeout)]
        with console.status("Pier"):
            rows.append(of_pier(setting))
    except PierError as error:
        raise click.ClickException(f"{error.problem}\n{error.remedy}") from error
    console.print(table(rows, setting))
    for row in rows:
        for problem in row.other:
            console.print(f"{row.system}: {problem}", markup=False, highlight=False)
    if json_file:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    cli()
