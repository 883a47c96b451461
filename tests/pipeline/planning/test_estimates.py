"""What the search reckons without a simulation, against the simulation of a microbatch on its own."""

from __future__ import annotations

import numpy as np
from pipeline.planning.cases import problem

from pier_node.pipeline.planning.moves import State, lengthening
from pier_node.pipeline.planning.plan import random_plan
from pier_node.pipeline.planning.simulator import NEVER, makespan_ns, rows, scratch, tables


def test_paths_lengthen_by_what_each_takes_alone() -> None:
    it = problem(transfer_s=tuple(tuple(0.1 * (2 * a + b) for b in range(6)) for a in range(6)))
    times, alone = tables(it), scratch(6, np.zeros(1, np.int64))
    before, after = (rows(random_plan(it, seed))[0] for seed in (1, 2))
    after[0] = before[0]
    states = [State(paths, *(np.zeros(1, np.int64) for _ in range(3))) for paths in (before, after)]
    took = [sum(makespan_ns(times, alone, path[None], NEVER) for path in paths) for paths in (before, after)]
    assert took[0] != took[1]
    assert lengthening(times, *states) == took[1] - took[0]
