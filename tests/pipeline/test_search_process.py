"""The search in a process of its own: better or equal, and nothing lost when it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from pipeline.test_paths_file import PLAN, PROBLEM

from pier_node.pipeline import search_process
from pier_node.pipeline.planning.check import violations
from pier_node.pipeline.planning.simulate import makespan
from pier_node.pipeline.search_process import search_apart

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
    monkeypatch.setattr(search_process, "COMPILING", -0.05)
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
