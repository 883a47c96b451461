"""Hunts for schedules that break what must hold: `python -m simulation.hunt --seeds 0-20000 --jobs 1`, in tests/.

    --replay SEED   plays one of them, and says all that happens
    --shrink SEED   leaves out faults for as long as it fails, and plays what is left
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from simulation.faults import Schedule, drawn
from simulation.world import played


def hunted(seed: int, pairs: bool = False) -> tuple[int, list[str], list[str]]:
    """What a seed breaks, and what flaws it shows."""
    world = played(drawn(seed, pairs))
    return seed, world.failures, world.flaws


def shrunk(schedule: Schedule) -> Schedule:
    """The same with as few faults as still break something of the same kind."""
    kind = _kind(played(schedule).failures)
    number = 0
    while number < len(schedule.faults):
        less = schedule.without(number)
        if _kind(played(less).failures) == kind:
            schedule, number = less, 0
        else:
            number += 1
    return schedule


def _kind(failures: list[str]) -> str:
    return failures[0].partition(":")[0] if failures else ""


def main() -> None:
    """The command."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names have an order of their own otherwise
        os.execve(sys.executable, [sys.executable, "-m", "simulation.hunt", *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-200", help="FIRST-END")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pairs", action="store_true", help="runs of NoLoCo")
    parser.add_argument("--replay", type=int)
    parser.add_argument("--shrink", type=int)
    options = parser.parse_args()
    if options.replay is not None or options.shrink is not None:
        schedule = drawn(options.replay if options.replay is not None else options.shrink, options.pairs)
        if options.shrink is not None:
            schedule = shrunk(schedule)
        print(schedule, flush=True)
        failures = played(schedule, say=lambda text: print(text, flush=True)).failures
        print("\n".join(failures) or "all holds")
        sys.exit(1 if failures else 0)
    first, _, end = options.seeds.partition("-")
    sys.exit(hunt(range(int(first), int(end)), options.jobs, options.pairs))


def hunt(seeds: range, jobs: int, pairs: bool) -> int:
    """Play them all; tell of each that breaks something."""
    began, kinds, played_ = time.monotonic(), Counter[str](), 0
    with ProcessPoolExecutor(jobs) as pool:
        results = map(hunted, seeds, [pairs] * len(seeds)) if jobs == 1 else pool.map(hunted, seeds, [pairs] * len(seeds), chunksize=8)
        for seed, failures, flaws in results:
            played_ += 1
            for flaw in flaws[:1]:
                kinds[_kind([flaw])] += 1
                print(f"seed {seed}: ({flaw})", flush=True)
            if failures:
                kinds[_kind(failures)] += 1
                print(f"seed {seed}: {failures[0]}", flush=True)
            if played_ % 500 == 0:
                print(f"... {played_} played, {(time.monotonic() - began) / played_:.3f} s each, {dict(kinds)}", flush=True)
    seconds = time.monotonic() - began
    print(f"{played_} schedules in {seconds:.0f} s, {seconds / max(played_, 1):.3f} s each: {dict(kinds) or 'all hold'}")
    return 1 if kinds else 0


if __name__ == "__main__":
    main()
