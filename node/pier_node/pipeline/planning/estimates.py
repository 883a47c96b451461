"""Estimates the time of an iteration from what every site has to do, as if nothing ever waited; compiled.

A tally has two sums for each site: how long a slot of its memory is held, and how long it works. A change of a plan
changes few paths, so the tally is brought up to date instead of made anew.
"""

from __future__ import annotations

from pier_node.pipeline.planning.moves import State
from pier_node.pipeline.planning.simulator import (
    BACKWARD,
    FORWARD,
    GAP,
    LOSS,
    MEMORY,
    Ints,
    Tables,
    compiled,
    inlined,
    unloaded,
)

HELD, WORK = range(2)
"""Rows of a tally, whose columns are the sites."""


@compiled
def tally(t: Tables, sites: Ints, s: State) -> None:
    """Set how long each site works and its memory is held if nothing waits."""
    sites[HELD] = 0
    sites[WORK] = 0
    for row in range(s.paths.shape[0]):
        _count(t.times, t.wire, t.gaps, sites, s.paths, row, 1)


@compiled
def retally(t: Tables, sites: Ints, before: State, after: State) -> None:
    """Bring a tally up to date: only the paths that differ are counted."""
    for row in range(after.paths.shape[0]):
        if _differs(before.paths, after.paths, row):
            _count(t.times, t.wire, t.gaps, sites, before.paths, row, -1)
            _count(t.times, t.wire, t.gaps, sites, after.paths, row, 1)


@compiled
def lengthening(t: Tables, before: State, after: State) -> int:
    """By how many ns all paths together take longer if nothing waits."""
    total = 0
    for row in range(after.paths.shape[0]):
        if _differs(before.paths, after.paths, row):
            total += unloaded(t.times, t.wire, after.paths, row) - unloaded(t.times, t.wire, before.paths, row)
    return total


@inlined
def _differs(before: Ints, after: Ints, row: int) -> bool:
    differs = False
    for index in range(after.shape[1]):
        differs |= before[row, index] != after[row, index]
    return differs


@inlined
def _count(times: Ints, wire: Ints, gaps: Ints, sites: Ints, paths: Ints, row: int, sign: int) -> None:
    """Add a path to the tally, or take it out."""
    before, left = paths[row, 0], unloaded(times, wire, paths, row)
    sites[WORK, before] += sign * times[LOSS, before]
    for index in range(paths.shape[1]):
        site = paths[row, index]
        if index > 0:
            left -= wire[before, site] + wire[site, before]
        sites[HELD, site] += sign * (left // times[MEMORY, site])
        busy = times[FORWARD, site] + times[BACKWARD, site]
        sites[WORK, site] += sign * (busy + 2 * gaps[GAP])
        left -= busy
        before = site


@compiled
def estimate(sites: Ints, s: State) -> int:
    """Time of the busiest site or of the busiest slot of memory if nothing waits, plus the data nodes' mean slot."""
    worst, total, nodes, last = 0, 0, 0, 0
    for site in range(sites.shape[1]):
        if s.stage[site] == 0:
            total += sites[HELD, site]
            nodes += 1
        busy = max(sites[HELD, site], sites[WORK, site])
        if busy > worst:
            worst, last = busy, site
    s.last[0] = last
    return int(worst + total // nodes)
