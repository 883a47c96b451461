"""Paths that a site has planned, drawn for the page: nothing about them is believed."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from coordinator.cases import ALICE, running
from coordinator.played import Replayed
from pipeline.test_paths_file import PROBLEM

from pier_coordinator.runs import drawing
from pier_coordinator.runs.drawing import Drawing, draw, drawn, keep_drawn
from pier_node.base.errors import PierError
from pier_node.pipeline.paths_file import paths_json
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.simulate import makespan
from pier_proto.v1.coordinator_pb2 import Paths

EVEN = replace(PROBLEM, rules=replace(PROBLEM.rules, max_jump=2))
PATHS = Plan(((0,), (1, 2), (3,)), (((0, 1), (0, 3)),))
CONTENT = paths_json(7, EVEN, PATHS).decode()


class Looked(Replayed):
    """A board that somebody watches for drawings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: asyncio.Queue[Drawing] = asyncio.Queue()

    def drawn(self, drawing: Drawing) -> None:
        super().drawn(drawing)
        self.seen.put_nowait(drawing)


def said(**changes: Any) -> str:
    """The same with other keys of the problem or the plan."""
    body = json.loads(CONTENT)
    problem = json.loads(body["problem"])
    body["problem"] = json.dumps(problem | {key: it for key, it in changes.items() if key in problem})
    return json.dumps({**body, "plan": body["plan"] | {key: it for key, it in changes.items() if key in body["plan"]}})


def test_it_has_the_time_the_stages_and_a_picture_with_names() -> None:
    found = drawn(CONTENT, {"a": "lab <a>"})
    assert found["seconds"] == pytest.approx(makespan(EVEN, PATHS))
    assert found["stages"] == [["a"], ["b", "c"], ["d"]]
    # Of each microbatch site a does a forward, the loss and a backward, 1 + 0.5 + 2 s.
    assert found["busy"]["a"] == pytest.approx(2 * 3.5 / found["seconds"])
    assert found["busy"]["c"] == 0
    assert "lab <a>" in "".join(ElementTree.fromstring(found["svg"]).itertext())


WRONG = {
    "no JSON": "paths",
    "no paths": "[]",
    "a site that does not exist": said(waves=[[["a", "x"], ["a", "d"]]]),
    "a path that is too short": said(waves=[[["a"], ["a", "d"]]]),
    "a number for a path": said(waves=[[3, ["a", "d"]]]),
    "more than a site can hold": said(microbatches=8, waves=[[["a", "b"]] * 4 + [["a", "d"]] * 4]),
    "a time that is none": said(uplink_s=[math.inf] * 4),
    "a time before now": said(transfer_s=[[-1.0] * 4] * 4),
    "a site twice": said(stages=[["a"], ["a", "c"], ["d"]]),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_allowed_is_refused(content: str) -> None:
    with pytest.raises((PierError, ValueError, KeyError, TypeError)):
        drawn(content, {})


@pytest.mark.processes
async def test_a_process_draws_and_the_coordinator_outlives_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "REST", 0.1)
    board = Looked()
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        async with run.site(ALICE) as alice:
            lease = (await alice.register(ALICE)).lease
            await alice.beat(ALICE, lease, Paths(round=6, content=b"\xff{"))
            work = asyncio.create_task(keep_drawn(run.coordinator, board))
            with pytest.raises(PierError, match="planned for round 6 cannot be drawn"):
                await draw(Paths(round=6, content=b"\xff{"), {})
            await alice.beat(ALICE, lease, Paths(round=7, content=CONTENT.encode()))
            async with asyncio.timeout(60):
                shown = await board.seen.get()
            work.cancel()
    assert shown.round == 7
    assert shown.svg.startswith("<svg")


@pytest.mark.processes
async def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "DEADLINE", 0.01)
    with pytest.raises(PierError, match="longer than"):
        await draw(Paths(round=7, content=CONTENT.encode()), {})


async def test_a_process_that_cannot_be_started_is_no_more_than_a_drawing_less(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: str, **__: Any) -> asyncio.subprocess.Process:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(PierError, match=r"planned for round 7 cannot be drawn: .*unavailable"):
        await draw(Paths(round=7, content=CONTENT.encode()), {})
