"""How long does a site not train at the boundary of a round?

`python -m bench.boundary --against CHECKOUT`: one site of a real run trains gpt2-small on a CPU, with few and with many
inner steps a round, first with this code and then with another checkout's, such as a worktree of an earlier commit. A
round's seconds grow with its steps; what is left at no steps is the boundary: the workers wait while weights are
published, the outer step is taken, and states go to the disk. Each figure is a median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

STEPS = (6, 18)
"""Inner steps of a round, few and many."""
SKIPPED = 1
"""Rounds that are not counted: buffers are touched for the first time in the first."""


class Pace(NamedTuple):
    """Of a run: median seconds of a round, and of that what its decision took (exchange, outer step, state to disk)."""

    round: float
    decision: float


def run_toml(preset: str, steps: int, rounds: int) -> str:
    """The run: text that every machine has, and nothing is validated on the way."""
    return f"""
[run]
sites = 1
[model]
preset = "{preset}"
context = 64
[data]
source = "text"
path = "{argparse.__file__}"
[inner]
total_steps = {steps * rounds}
batch_size = 1
eval_every = 0
[outer]
algorithm = "diloco"
inner_steps = {steps}
"""


def pace(checkout: Path, preset: str, steps: int, rounds: int) -> Pace:
    """Train with a checkout's code. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        run, data = Path(folder) / "run.toml", Path(folder) / "data"
        run.write_text(run_toml(preset, steps, rounds))
        command = ("pier_node.cli", "start", "--run", str(run), "--data", str(data), "--listen", "127.0.0.1:0")
        path = os.pathsep.join(str(checkout / part) for part in ("node", "coordinator", "protos"))
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([sys.executable, "-m", *command], env=environment, stdout=subprocess.DEVNULL, check=True)
        events = [json.loads(line) for line in (data / "events.jsonl").read_text().splitlines()]
    times = [event["time"] for event in events if event["round"] > SKIPPED]
    decisions = [event["round_seconds"] for event in events if event["round"] > SKIPPED]
    return Pace(median(after - before for before, after in pairwise(times)), median(decisions))


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
    table = Table("code", "an inner step", "the boundary", "of it the decision", title=f"{options.preset}, one site")
    found = []
    for name, checkout in (("this", here), *([("the other", options.against)] if options.against else [])):
        few, many = (pace(checkout.resolve(), options.preset, steps, options.rounds) for steps in STEPS)
        step, idle = boundary(few, many)
        found.append(idle)
        table.add_row(name, f"{step:.2f} s", f"{idle:.2f} s", f"{few.decision:.2f} s")
    Console().print(table)
    if len(found) > 1:
        print(f"this boundary takes {found[0] / found[1]:.2f} of the other's time")


if __name__ == "__main__":
    main()
