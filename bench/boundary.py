"""For how long does a site stop training at the boundary of a round, and what is that time spent on?

`python -m bench.boundary --against CHECKOUT`: one site of a real run trains gpt2-small on a CPU, with few and with
many inner steps a round, first with this code and then with another checkout's, such as a worktree of an earlier
commit. bench/boundary_hook measures from inside the daemon: idle is the time from the end of a round's last inner step
to the beginning of the next round's first, and each part of it is a call. A round's seconds grow with its steps;
extrapolated to no steps, what is left is the boundary, including how much it slows inner steps, because states are
written while they run. Each figure is a median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.tiny_run import packages, tiny_run

STEPS = (6, 18)
"""Inner steps of a round, few and many."""
SKIPPED = 1
"""Rounds that are not counted: buffers are touched for the first time in the first."""


HOOK = Path(__file__).resolve().parent / "boundary_hook"


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


def run_toml(preset: str, steps: int, rounds: int) -> str:
    """The run.toml of one site."""
    return tiny_run(1, steps * rounds, steps, model={"preset": preset, "context": 64}, batch_size=1)


def pace(checkout: Path, preset: str, steps: int, rounds: int) -> Pace:
    """Train with a checkout's code. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        run, data, parts = Path(folder) / "run.toml", Path(folder) / "data", Path(folder) / "parts.jsonl"
        run.write_text(run_toml(preset, steps, rounds))
        command = ("pier_node.cli", "start", "--run", str(run), "--data", str(data), "--listen", "127.0.0.1:0")
        path = os.pathsep.join(map(str, (HOOK, *packages(checkout))))
        environment = {**os.environ, "PYTHONPATH": path, "PIER_BENCH_PARTS": str(parts)}
        subprocess.run([sys.executable, "-m", *command], env=environment, stdout=subprocess.DEVNULL, check=True)
        return of_calls([json.loads(line) for line in parts.read_text().splitlines()], steps)


def of_calls(calls: Sequence[Mapping[str, Any]], steps: int) -> Pace:
    """What the calls that the hook has noted say of rounds of so many inner steps."""
    done = sorted((call["began"], call["began"] + call["seconds"]) for call in calls if call["part"] == "step")
    rounds = [done[first : first + steps] for first in range(0, len(done) - steps + 1, steps)]
    gaps = [following[0][0] - before[-1][1] for before, following in pairwise(rounds)]
    whole = [following[0][0] - before[0][0] for before, following in pairwise(rounds)]
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
    return Pace(median(whole[SKIPPED:]), median(gaps[SKIPPED:]), parts)


def boundary(few: Pace, many: Pace, steps: Sequence[int] = STEPS) -> tuple[float, float]:
    """Seconds of an inner step, and of a round without any."""
    step = (many.round - few.round) / (steps[1] - steps[0])
    return step, few.round - steps[0] * step


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--preset", default="gpt2-small", help="the model")
    parser.add_argument("--rounds", type=int, default=6, help="of each run")
    options = parser.parse_args()
    here = Path(__file__).resolve().parent.parent
    codes = {"this": here, **({"the other": options.against} if options.against else {})}
    table, inside = Table(title=f"{options.preset}, one site"), Table(title="parts of a round, in seconds")
    for heading in ("code", "an inner step", "the boundary", "idle"):
        table.add_column(heading)
    found, paces = [], list[Pace]()
    for name, checkout in codes.items():
        few, many = (pace(checkout.resolve(), options.preset, steps, options.rounds) for steps in STEPS)
        step, whole = boundary(few, many)
        found.append(whole)
        paces.append(few)
        table.add_row(name, f"{step:.2f} s", f"{whole:.2f} s", f"{few.idle:.2f} s")
    inside.add_column("part")
    for name in codes:
        inside.add_column(name)
    for part in dict.fromkeys(part for each in paces for part in each.parts):
        inside.add_row(part, *(f"{each.parts[part]:.3f}" if part in each.parts else "" for each in paces))
    Console().print(table, inside)
    if len(found) > 1:
        ratio = paces[0].idle / paces[1].idle
        print(f"this boundary takes {found[0] / found[1]:.2f} of the other's time, and is idle for {ratio:.2f} of it")


if __name__ == "__main__":
    main()
