"""Hunts for schedules that break what must hold: `python -m simulation.hunt --seeds 0-20000 --jobs 1`, in tests/.

--replay SEED   plays one of them, and says all that happens
--shrink SEED   leaves out faults for as long as it fails in the same way, and plays what is left
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from simulation.faults import Schedule, drawn
from simulation.playing import played

EVERY = 500
"""Schedules between two lines that say how far it is."""


def hunted(seed: int, pairs: bool = False) -> tuple[int, list[str], list[str]]:
    """A seed, what it breaks, and what flaws it shows."""
    world = played(drawn(seed, pairs))
    return seed, world.failures, world.flaws


def shrunk(schedule: Schedule) -> Schedule:
    """The same with as few faults as still break something of the same kind."""
    kind, number = _kind(schedule), 0
    while number < len(schedule.faults):
        less = schedule.without(number)
        if _kind(less) == kind:
            schedule, number = less, 0
        else:
            number += 1
    return schedule


def hunt(seeds: range, jobs: int, pairs: bool, strict: bool) -> bool:
    """Play them all, and tell of each that breaks something. Returns whether all hold."""
    began, kinds = time.monotonic(), Counter[str]()
    for count, (seed, failures, flaws) in enumerate(_results(seeds, jobs, pairs), 1):
        for told in (failures + flaws)[:1]:
            kinds[told.partition(":")[0]] += 1
            print(f"seed {seed}: {told if failures else f'({told})'}", flush=True)
        if count % EVERY == 0 or count == len(seeds):
            each = (time.monotonic() - began) / count
            print(f"{count} schedules, {each:.3f} s each: {dict(kinds) or 'all hold'}", flush=True)
    return not (kinds if strict else kinds.keys() - {"undone", "traceback", "only copy"})


def _results(seeds: range, jobs: int, pairs: bool) -> Iterator[tuple[int, list[str], list[str]]]:
    if jobs == 1:
        yield from (hunted(seed, pairs) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(hunted, seeds, [pairs] * len(seeds), chunksize=8)


def _kind(schedule: Schedule) -> str:
    world = played(schedule)
    return (world.failures + world.flaws)[0].partition(":")[0] if world.failures + world.flaws else ""


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """The command."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # else sets of names have another order in each process
        here = [sys.executable, "-m", "simulation.hunt", *sys.argv[1:]]
        os.execve(sys.executable, here, os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-200", help="FIRST-END, the last of them left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--pairs", action="store_true", help="runs of NoLoCo")
    parser.add_argument("--strict", action="store_true", help="flaws, which are told in brackets, fail too")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    options = parser.parse_args()
    if options.replay is None and options.shrink is None:
        first, _, end = options.seeds.partition("-")
        sys.exit(not hunt(range(int(first), int(end)), options.jobs, options.pairs, options.strict))
    if options.shrink is None:
        schedule = drawn(options.replay, options.pairs)
    else:
        schedule = shrunk(drawn(options.shrink, options.pairs))
    _say(str(schedule))
    world = played(schedule, _say)
    _say("\n".join(world.failures + world.flaws) or "all holds")
    sys.exit(bool(world.failures))


if __name__ == "__main__":
    main()
