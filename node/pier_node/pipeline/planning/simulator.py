"""Simulates an iteration of a plan: the tasks of every site and the transfers between sites, with their times.

A site serves one task at a time. Among the tasks that have arrived, earlier waves come first, then earlier arrivals;
new microbatches of the site itself come last. A forward needs a free memory slot, which the end of its backward frees.
After each task the site idles for a gap. So a slot is free before its site is, and the arrivals that a task causes come
after its own start. It is therefore enough to process the starts of tasks in the order of time.

The core is compiled and counts whole nanoseconds, so that nothing depends on rounding. Compiled functions take a few
plain arrays instead of tuples: compiled code counts references to each array of a tuple, which costs more than the
simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pier_node.base.compiling import Compiler
from pier_node.base.errors import PierError
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem

Ints = NDArray[np.int64]


_compiler = Compiler("paths", Path(__file__).parent.glob("*.py"))
compiled, inlined = _compiler.compiled, _compiler.inlined

NEVER = 1 << 62
"""A time that never comes: of a deadlock, or of an abandoned simulation."""
OWN = 1 << 61
WAVE = 1 << 50
"""Components of the priority: below WAVE there is room for 13 days of nanoseconds."""

FORWARD, BACKWARD, LOSS, MEMORY, UPLINK = range(5)
"""Rows of `times`."""
GAP, FIRST_GAP, WAVE_GAP = range(3)
FREE, PLACES, LINE, DUE, WAITING, SOONEST = range(6)
"""Rows of `sites`: end of idling, free slots, when the uplink is free, start of the next task, tasks queued; and the
earliest start in each block of sites.
"""
BLOCK = 8
STEP, ARRIVAL, LEFT, END, WAVE_OF = range(5)
"""Rows of `cases`: of each microbatch's next task, and the unobstructed time of all that is left."""


class Tables(NamedTuple):
    """A problem in nanoseconds: `times` [5, N], `wire` [from N, to N], `gaps` [3]."""

    times: Ints
    wire: Ints
    gaps: Ints


class Scratch(NamedTuple):
    """Arrays of a simulation: `sites` [6, N], `cases` [5, B], `queue` [N, B], `record` [B, 2 L + 1, 4] or empty.

    A record has the arrival, start and end of each task, and the departure of its result.
    """

    sites: Ints
    cases: Ints
    queue: Ints
    record: Ints


def scratch(sites: int, wave: Ints, recorded_steps: int = 0) -> Scratch:
    """Allocate arrays for simulations of microbatches in these waves."""
    count = len(wave)
    cases = np.zeros((5, count), np.int64)
    cases[WAVE_OF] = wave
    record = np.zeros((count if recorded_steps else 0, recorded_steps, 4), np.int64)
    return Scratch(np.zeros((6, sites), np.int64), cases, np.zeros((sites, count), np.int64), record)


@compiled
def makespan_ns(t: Tables, d: Scratch, paths: Ints, limit: int) -> int:
    """The makespan in ns; NEVER for a deadlock by memory, or as soon as it is certain to exceed the limit.

    Args:
        paths: [B, L], the sites of each microbatch, wave by wave; microbatches of one site start in this order.
    """
    times, wire, gaps = t.times, t.wire, t.gaps
    sites, cases, queue, record = d.sites, d.cases, d.queue, d.record
    _begin(times, wire, gaps, sites, cases, queue, paths)
    length, makespan = paths.shape[1], 0
    for _ in range(paths.shape[0] * (2 * length + 1)):
        site = _first(sites)
        start = sites[DUE, site]
        if start == NEVER:
            return NEVER
        it = _take(sites, cases, queue, length, site)
        if start + cases[LEFT, it] > limit:
            return NEVER
        end = _serve(times, gaps, sites, cases, queue, length, site, it)
        if record.shape[0]:
            record[it, cases[STEP, it], 0] = cases[ARRIVAL, it]
            record[it, cases[STEP, it], 1] = start
            record[it, cases[STEP, it], 2] = end
            record[it, cases[STEP, it], 3] = max(end, sites[LINE, site])
        makespan = max(makespan, end)
        if cases[STEP, it] < 2 * length:
            _send(times, wire, sites, cases, queue, paths, site, it, end)
    return int(makespan)


@inlined
def unloaded(times: Ints, wire: Ints, paths: Ints, row: int) -> int:
    """Nanoseconds that a microbatch takes on its path without any waiting."""
    first, before = paths[row, 0], paths[row, 0]
    total = times[FORWARD, first] + times[BACKWARD, first] + times[LOSS, first]
    for index in range(1, paths.shape[1]):
        site = paths[row, index]
        total += times[FORWARD, site] + times[BACKWARD, site] + wire[before, site] + wire[site, before]
        before = site
    return int(total + wire[before, first] + wire[first, before])


@inlined
def _begin(times: Ints, wire: Ints, gaps: Ints, sites: Ints, cases: Ints, queue: Ints, paths: Ints) -> None:
    for site in range(sites.shape[1]):
        sites[FREE, site] = sites[LINE, site] = sites[WAITING, site] = 0
        sites[DUE, site] = NEVER
        sites[PLACES, site] = times[MEMORY, site]
    for it in range(paths.shape[0]):
        site, rank = paths[it, 0], 0
        for index in range(sites[WAITING, site] - 1, -1, -1):
            if cases[WAVE_OF, queue[site, index]] != cases[WAVE_OF, it]:
                break
            rank += 1
        queue[site, sites[WAITING, site]] = it
        sites[WAITING, site] += 1
        cases[STEP, it] = 0
        cases[ARRIVAL, it] = gaps[WAVE_GAP] * cases[WAVE_OF, it] + times[FORWARD, site] * rank
        cases[LEFT, it] = unloaded(times, wire, paths, it)
        sites[DUE, site] = min(sites[DUE, site], cases[ARRIVAL, it])
    for site in range(0, sites.shape[1], BLOCK):
        _changed(sites, site)


@inlined
def _first(sites: Ints) -> int:
    """The site whose next task starts first."""
    block = 0
    for other in range(1, (sites.shape[1] - 1) // BLOCK + 1):
        if sites[SOONEST, other] < sites[SOONEST, block]:
            block = other
    best = block * BLOCK
    while sites[DUE, best] != sites[SOONEST, block]:
        best += 1
    return int(best)


@inlined
def _changed(sites: Ints, site: int) -> None:
    """Note that a site's next task may start at another time."""
    block, first = site // BLOCK, NEVER
    for other in range(block * BLOCK, min(block * BLOCK + BLOCK, sites.shape[1])):
        first = min(first, sites[DUE, other])
    sites[SOONEST, block] = first


@inlined
def _take(sites: Ints, cases: Ints, queue: Ints, length: int, site: int) -> int:
    now, room = sites[DUE, site], sites[PLACES, site] > 0
    best, chosen, place = NEVER, 0, 0
    for index in range(sites[WAITING, site]):
        it = queue[site, index]
        if cases[ARRIVAL, it] > now or (cases[STEP, it] < length and not room):
            continue
        key = WAVE * cases[WAVE_OF, it] + cases[ARRIVAL, it]
        if cases[STEP, it] == 0:
            key += OWN
        if key < best or (key == best and it < chosen):
            best, chosen, place = key, it, index
    sites[WAITING, site] -= 1
    queue[site, place] = queue[site, sites[WAITING, site]]
    return chosen


@inlined
def _serve(times: Ints, gaps: Ints, sites: Ints, cases: Ints, queue: Ints, length: int, site: int, it: int) -> int:
    """Do a task. Returns its end, and sets the start of the site's next task as far as it is known."""
    step = cases[STEP, it]
    if step < length:
        took = times[FORWARD, site]
        sites[PLACES, site] -= 1
    elif step == length:
        took = times[LOSS, site]
    else:
        took = times[BACKWARD, site]
        sites[PLACES, site] += 1
    cases[LEFT, it] -= took
    end = sites[DUE, site] + took
    cases[END, it] = end
    sites[FREE, site] = end + (gaps[FIRST_GAP] if step == 0 else gaps[GAP])
    first, room = NEVER, sites[PLACES, site] > 0
    for index in range(sites[WAITING, site]):
        other = queue[site, index]
        if (room or cases[STEP, other] >= length) and cases[ARRIVAL, other] < first:
            first = cases[ARRIVAL, other]
    sites[DUE, site] = first if first == NEVER else max(first, sites[FREE, site])
    _changed(sites, site)
    return int(end)


@inlined
def _send(
    times: Ints, wire: Ints, sites: Ints, cases: Ints, queue: Ints, paths: Ints, site: int, it: int, end: int
) -> None:
    """Send the result of a task to the next site, once the uplink is free."""
    length, step = paths.shape[1], cases[STEP, it] + 1
    to = paths[it, step % length] if step <= length else paths[it, 2 * length - step]
    departure = max(end, sites[LINE, site])
    sites[LINE, site] = departure + times[UPLINK, site]
    cases[STEP, it] = step
    cases[ARRIVAL, it] = departure + wire[site, to]
    cases[LEFT, it] -= wire[site, to]
    queue[to, sites[WAITING, to]] = it
    sites[WAITING, to] += 1
    if step >= length or sites[PLACES, to] > 0:
        sites[DUE, to] = min(sites[DUE, to], max(sites[FREE, to], cases[ARRIVAL, it]))
        _changed(sites, to)


NANO = 1e9


def ticks(seconds: Sequence[float] | Sequence[Sequence[float]]) -> Ints:
    """Seconds, of any shape, in whole nanoseconds."""
    return np.rint(np.asarray(seconds, dtype=np.float64) * NANO).astype(np.int64)


def tables(problem: Problem) -> Tables:
    """The times of a problem as arrays."""
    sites = problem.sites
    seconds = [[getattr(site, key) for site in sites] for key in ("forward_s", "backward_s", "loss_s")]
    memory = np.array([[site.memory for site in sites]], np.int64)
    uplink = ticks([problem.uplink_s or (0.0,) * len(sites)])
    gaps = ticks([problem.task_gap_s, problem.first_gap_s, problem.wave_s])
    return Tables(np.concatenate([ticks(seconds), memory, uplink]), ticks(problem.transfer_s), gaps)


def rows(plan: Plan) -> tuple[Ints, Ints]:
    """The paths of all microbatches [B, L], and the wave of each [B]."""
    numbers = [number for number, wave in enumerate(plan.waves) for _ in wave]
    return np.array(plan.paths, np.int64), np.array(numbers, np.int64)


Kind = Literal["forward", "loss", "backward"]
Way = Literal["forward", "backward"]


@dataclass(frozen=True)
class Task:
    """A site's work on a microbatch, which waits there from arrival to start.

    Times in seconds from the iteration's start.
    """

    site: int
    microbatch: int
    kind: Kind
    arrival_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Transfer:
    """An activation, or on the way back a gradient, sent between two sites."""

    source: int
    target: int
    microbatch: int
    kind: Way
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """An iteration. Microbatches are numbered wave by wave, like the plan's paths."""

    sites: int
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last backward is done."""
        return max(task.end_s for task in self.tasks)

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """The fraction of the iteration in which each site computes."""
        busy = [0.0] * self.sites
        for task in self.tasks:
            busy[task.site] += task.end_s - task.start_s
        return tuple(seconds / self.makespan_s for seconds in busy)


def simulate(problem: Problem, plan: Plan) -> Schedule:
    """Simulate an iteration of a valid plan. Raises PierError: microbatches deadlock on each other's memory."""
    paths, wave = rows(plan)
    length = paths.shape[1]
    room = scratch(len(problem.sites), wave, recorded_steps=2 * length + 1)
    if makespan_ns(tables(problem), room, paths, NEVER) == NEVER:
        raise PierError(
            "this plan never ends: microbatches wait for each other's memory",
            "Allow no swaps (rules.max_swaps = 0), which rules that out, or give the sites more memory.",
        )
    return _schedule(len(problem.sites), paths, room.record / NANO)


def makespan(problem: Problem, plan: Plan) -> float:
    """Seconds of an iteration. Raises PierError, as `simulate` does."""
    return simulate(problem, plan).makespan_s


def _schedule(sites: int, paths: Ints, record: NDArray[np.float64]) -> Schedule:
    tasks, transfers = [], []
    length = paths.shape[1]
    for number, (path, times) in enumerate(zip(paths.tolist(), record.tolist(), strict=True)):
        way = [*path, path[0], *reversed(path)]
        for step, (arrival, start, end, departure) in enumerate(times):
            kind: Kind = "forward" if step < length else "loss" if step == length else "backward"
            tasks.append(Task(way[step], number, kind, arrival, start, end))
            if step < 2 * length:
                sent: Way = "forward" if step < length else "backward"
                transfers.append(Transfer(way[step], way[step + 1], number, sent, departure, times[step + 1][0]))
    return Schedule(sites, tuple(sorted(tasks, key=lambda it: it.start_s)), tuple(transfers))
