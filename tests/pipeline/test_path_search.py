"""The search for better paths: in a process of its own, beside the iterations, one at a time, followed by a rest."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pipeline.test_paths_file import PLAN, PROBLEM

from pier_node.pipeline import path_search
from pier_node.pipeline.path_search import Searching, search_apart
from pier_node.pipeline.planning.plan import Plan, violations
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.simulator import makespan

pytestmark = pytest.mark.processes


async def test_stages_stay_and_paths_are_no_worse() -> None:
    found = await search_apart(PROBLEM, 1, 0.1, PLAN, stages_stay=True)
    assert found.stages == PLAN.stages
    assert violations(PROBLEM, found) == []
    assert makespan(PROBLEM, found) <= makespan(PROBLEM, PLAN)


async def test_what_there_is_stays_when_the_search_fails(caplog: pytest.LogCaptureFixture) -> None:
    # The process refuses a problem that its own reader would never have made.
    broken = replace(PROBLEM)
    object.__setattr__(broken, "waves", 0)
    assert await search_apart(broken, 1, 0.1, PLAN, stages_stay=True) is PLAN
    assert "the search for paths failed" in caplog.text


async def test_a_search_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_search, "COMPILING", -0.05)
    assert await search_apart(PROBLEM, 1, 0.1, PLAN, stages_stay=True) is PLAN


async def test_what_there_is_stays_when_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(*_: str, **__: Any) -> asyncio.subprocess.Process:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    assert await search_apart(PROBLEM, 1, 0.1, PLAN, stages_stay=True) is PLAN
    assert "the search for paths failed: [Errno 11]" in caplog.text


@pytest.mark.parametrize("output", [b"", b"{}", b"[]", b'{"stages": [[0]], "waves": [[[7]]]}'])
async def test_what_there_is_stays_when_nobody_can_read_what_was_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, output: bytes
) -> None:
    start = asyncio.create_subprocess_exec

    async def odd(*_: str, **pipes: Any) -> asyncio.subprocess.Process:
        return await start("printf", "%s", output.decode(), **pipes)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", odd)
    assert await search_apart(PROBLEM, 1, 0.1, PLAN, stages_stay=True) is PLAN
    assert "the search for paths failed" in caplog.text


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
        monkeypatch.setattr(path_search, "REST", rest)
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
