"""A search beside the iterations: one at a time, given once, ended with what it computes, followed by a rest."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pipeline.test_paths_file import PLAN, PROBLEM

from pier_node.pipeline import planner
from pier_node.pipeline.planner import Searching
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.problem import Problem

BETTER = replace(PLAN)


class Slow:
    """A search that ends when it is let."""

    def __init__(self) -> None:
        self.gate, self.ended = asyncio.Event(), list[str]()

    async def __call__(self, problem: Problem, seed: int, seconds: float, current: Plan, stay: bool) -> Plan:
        assert stay
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return BETTER


async def test_what_is_found_is_given_once() -> None:
    slow = Slow()
    beside = Searching(slow)
    assert beside.idle
    assert beside.found() is None
    await beside.begin(PROBLEM, 1, 0.1, PLAN)
    await beside.wait(0.0)
    assert (beside.found(), beside.idle) == (None, False)
    slow.gate.set()
    await beside.wait(60.0)
    assert beside.found() is BETTER
    assert beside.found() is None


async def test_what_was_asked_before_is_dropped_and_a_site_that_ends_ends_it() -> None:
    slow = Slow()
    beside = Searching(slow)
    for _ in range(2):
        await beside.begin(PROBLEM, 1, 0.1, PLAN)
        await beside.wait(0.0)
    assert slow.ended == ["cancelled"]
    await beside.close()
    assert slow.ended == ["cancelled"] * 2
    assert beside.idle


async def test_after_a_search_there_is_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    beside = Searching(slow)
    slow.gate.set()
    for rest, idle in ((1e12, False), (0.0, True)):
        monkeypatch.setattr(planner, "REST", rest)
        await beside.begin(PROBLEM, 1, 0.1, PLAN)
        await beside.wait(60.0)
        assert beside.found() is BETTER
        assert beside.idle is idle


async def test_an_error_of_the_search_is_not_swallowed() -> None:
    async def broken(*_: object) -> Plan:
        raise ArithmeticError

    beside = Searching(broken)
    await beside.begin(PROBLEM, 1, 0.1, PLAN)
    await beside.wait(60.0)
    with pytest.raises(ArithmeticError):
        beside.found()
