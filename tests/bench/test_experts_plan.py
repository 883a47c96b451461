from __future__ import annotations

from bench.experts_plan import compared, instance
from pier_coordinator.experts.scheduling import Limits


def test_each_way_is_no_worse_than_the_one_before_it() -> None:
    for seed in range(3):
        runs, bound = compared(instance(9, 3, seed), Limits(5.0))
        assert [run.method for run in runs] == ["LPT", "LPT + local search", "planner"]
        ends = [run.makespan for run in runs]
        assert ends == sorted(ends, reverse=True)
        assert bound <= ends[-1]
