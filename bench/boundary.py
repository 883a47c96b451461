"""For how long does a site stop training at the boundary of a round, and what is that time spent on?

`python -m bench.boundary --against CHECKOUT`: sites of a real run train gpt2-small on a CPU, with few and with many
inner steps a round, first with this code and then with another checkout's, such as a worktree of an earlier commit.
bench/boundary_hook measures from inside the first site's daemon and workers: a round is idle while no inner step is
being done, and each part of the boundary is a call. With fragments, a round is that of all of them. Its seconds grow
with its steps; extrapolated to no steps, what is left is the boundary, including how much it slows inner steps, because
states are written while they run. Each figure is a median over rounds.

On a GPU a round must last longer than its state and its checkpoint take to be written, as rounds for slow links do, or
what is measured is the disk. One number of steps is enough to see how long it is idle:

    python -m bench.boundary --preset llama-1b --context 2048 --batch-size 4 --steps 300 --overlap --sites 2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.goodput_sites import Site, start_commands
from bench.ports import free_port
from bench.tiny_run import NOTHING, Keys, packages, tiny_run

SKIPPED = 1
"""Rounds that are not counted: buffers are touched for the first time in the first."""
LOOK_SECONDS = 0.5
HIDDEN: Keys = {"codec": "int4", "fragments": 4, "overlap": True}
"""What `pier-node init` writes for slow links."""

HOOK = Path(__file__).resolve().parent / "boundary_hook"


class Setting(NamedTuple):
    """What the sites train.

    Attributes:
        sites: number of them, all on this machine.
        outer: further keys of [outer].
    """

    preset: str = "gpt2-small"
    context: int = 64
    batch_size: int = 1
    sites: int = 1
    outer: Keys = NOTHING

    def run_toml(self, steps: int, rounds: int) -> str:
        """The run.toml of so many rounds of so many inner steps."""
        model: Keys = {"preset": self.preset, "context": self.context}
        return tiny_run(self.sites, steps * rounds, steps, self.outer, model, self.batch_size)


class Pace(NamedTuple):
    """Of a run, medians over rounds in seconds.

    Attributes:
        round: a whole one.
        idle: no inner step is being done.
        parts: what calls took, by name, in one round.
    """

    round: float
    idle: float
    parts: Mapping[str, float]


def pace(checkout: Path, setting: Setting, steps: int, rounds: int) -> Pace:
    """Train with a checkout's code. Raises RuntimeError: the first site has ended too early."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run, parts = Path(folder) / "run.toml", Path(folder) / "parts.jsonl"
        run.write_text(setting.run_toml(steps, rounds))
        folders = [Path(folder) / f"site-{number}" for number in range(setting.sites)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HOOK, *packages(checkout))))}
        sites = list[Site]()
        for command, data in zip(start_commands(run, folders, [f"127.0.0.1:{free_port()}" for _ in folders]), folders):
            measured = {} if sites else {"PIER_BENCH_PARTS": str(parts)}
            sites.append(Site([sys.executable, "-m", "pier_node.cli", *command[1:]], data, environment | measured))
            stack.callback(sites[-1].kill)
            sites[-1].start()
        done = 0
        while not sites[0].ended:
            if len(commits := sites[0].commits()) > done:
                done = len(commits)
                print(f"{setting.preset}, {steps} inner steps: round {done}", file=sys.stderr)
            time.sleep(LOOK_SECONDS)
        if len(sites[0].commits()) < rounds:
            raise RuntimeError(f"the site has ended before round {rounds}:\n{sites[0].tail()}")
        return of_calls([json.loads(line) for line in parts.read_text().splitlines()], steps)


def of_calls(calls: Sequence[Mapping[str, Any]], steps: int) -> Pace:
    """What the calls that the hook has noted say of rounds of so many inner steps."""
    done = sorted((call["began"], call["began"] + call["seconds"]) for call in calls if call["part"] == "step")
    rounds = [done[first : first + steps] for first in range(0, len(done) - steps + 1, steps)]
    whole = [following[0][0] - before[0][0] for before, following in pairwise(rounds)]
    idle = [seconds - sum(ends - began for began, ends in before) for seconds, before in zip(whole, rounds)]
    spent = defaultdict(list)
    for before, following in pairwise(rounds[SKIPPED:]):
        begins, ends = before[-1][1], following[-1][1]
        sums = defaultdict[str, float](float)
        for call in calls:
            if call["part"] != "step" and begins <= call["began"] < ends:
                sums[call["part"]] += call["seconds"]
        for part, seconds in sums.items():
            spent[part].append(seconds)
    parts = {part: median(seconds) for part, seconds in spent.items()}
    return Pace(median(whole[SKIPPED:]), median(idle[SKIPPED:]), parts)


def boundary(paces: Sequence[Pace], steps: Sequence[int]) -> tuple[float, float]:
    """Seconds of an inner step, and of a round without any, from rounds of few and of many inner steps."""
    few, many = paces
    step = (many.round - few.round) / (steps[1] - steps[0])
    return step, few.round - steps[0] * step


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--preset", default="gpt2-small", help="the model")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of an inner step at each site")
    parser.add_argument("--steps", type=_numbers, default=(6, 18), metavar="FEW,MANY", help="inner steps of a round")
    parser.add_argument("--sites", type=int, default=1, help="on this machine; the first is measured")
    parser.add_argument("--overlap", action="store_true", help="int4, four fragments, and results while workers train")
    parser.add_argument("--rounds", type=int, default=6, help="of each run")
    options = parser.parse_args()
    outer = HIDDEN if options.overlap else NOTHING
    setting = Setting(options.preset, options.context, options.batch_size, options.sites, outer)
    here = Path(__file__).resolve().parent.parent
    codes = {"this": here, **({"the other": options.against} if options.against else {})}
    paces = {
        name: [pace(checkout.resolve(), setting, steps, options.rounds) for steps in options.steps]
        for name, checkout in codes.items()
    }
    Console().print(*tables(setting, options.steps, paces))
    if len(paces) > 1:
        this, other = (few.idle for few, *_ in paces.values())
        print(f"this boundary is idle for {this / other:.2f} of the other's time")


def tables(setting: Setting, steps: Sequence[int], paces: Mapping[str, Sequence[Pace]]) -> tuple[Table, Table]:
    """How long the boundary takes, and its parts, of each code."""
    table = Table("code", "idle", "of the time", title=f"{setting.preset}, {setting.sites} site(s)")
    inside = Table("part", *paces, title=f"parts of a round of {steps[0]} inner steps, in seconds")
    extrapolated = len(steps) > 1
    if extrapolated:
        table.add_column("an inner step")
        table.add_column("the boundary")
    for name, found in paces.items():
        few, extra = found[0], boundary(found, steps) if extrapolated else ()
        table.add_row(name, f"{few.idle:.2f} s", f"{few.idle / few.round:.1%}", *(f"{part:.2f} s" for part in extra))
    for part in dict.fromkeys(part for few, *_ in paces.values() for part in few.parts):
        inside.add_row(part, *(f"{few.parts[part]:.3f}" if part in few.parts else "" for few, *_ in paces.values()))
    return table, inside


if __name__ == "__main__":
    main()
