"""A pipeline as the coordinator knows it, of pulses and drawings."""

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
from hypothesis import given
from hypothesis import strategies as st
from pipeline.test_paths_file import PROBLEM

from pier_coordinator.runs import pipeline as drawing
from pier_coordinator.runs.pipeline import PACE, Drawing, PipelineRows, PlaceRow, draw, drawn, keep_drawn
from pier_coordinator.store.facts import Fact
from pier_node.base.errors import PierError
from pier_node.config.run import SITES
from pier_node.pipeline.paths_file import paths_json
from pier_node.pipeline.planning.plan import Plan
from pier_node.pipeline.planning.simulator import makespan
from pier_proto.v1.coordinator_pb2 import Paths

A, B, C = ("aa" * 8, "bb" * 8, "cc" * 8)
NAMES = {A: "alpha", B: "beta", C: "gamma"}
TIMES = {"forward": 0.5, "backward": 1.0, "loss": 0.0}
PLACE = {"stage": 1, "memory": 3, **TIMES, "transfer": {B: 0.25}, "round_trip": {B: 0.04}}
DRAWING = Drawing(7, "2 microbatches through 2 of 3 stages", 12.5, [[A], [B]], {A: 0.5, B: 0.25}, "<svg/>")
VALUES = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(-(2**70), 2**70), st.text(max_size=20))
PLACES = st.dictionaries(st.sampled_from([*PLACE, "x"]), st.one_of(VALUES, st.dictionaries(VALUES, VALUES)))


@given(st.one_of(VALUES, PLACES))
def test_no_place_is_an_error_and_all_that_is_kept_is_a_number(said: Any) -> None:
    board = Replayed()
    board.pulse(A, {"place": said}, alive=True)
    board.drawn(DRAWING)
    told = {"board": board.snapshot(), "api": board.pipeline.measured(NAMES)}
    assert json.loads(json.dumps(told, allow_nan=False))["board"]["pipeline"]["plan"]["seconds"] == 12.5
    place = PlaceRow.of(said)
    assert place is None or min(place.forward, place.backward, place.loss, *place.transfer.values()) >= 0


def test_maps_hold_node_ids_only_and_no_more_than_a_run_has_sites() -> None:
    ways = {f"{number:016x}": 0.1 for number in range(SITES + 50)} | {"lab": 1.0}
    place = PlaceRow.of({**PLACE, "transfer": ways, "round_trip": {"../x": 1.0, A: 0.5}})
    assert place is not None
    assert len(place.transfer) == SITES
    assert place.round_trip == {A: 0.5}


def test_sites_are_measured_as_they_last_said() -> None:
    rows = PipelineRows()
    rows.placed(A, {**PLACE, "forward": 9.0}, 1)
    rows.placed(A, PLACE, 2)
    rows.placed(C, PLACE, 3)
    assert rows.measured({A: "alpha", B: "beta"}) == [
        {"node": A, "name": "alpha", **PLACE},
        {"node": B, "name": "beta", "transfer": {}, "round_trip": {}}
        | dict.fromkeys(("stage", "memory", "forward", "backward", "loss")),
    ]


def test_the_page_is_told_of_changes_and_of_no_pipeline_nothing() -> None:
    rows = PipelineRows()
    rows.placed(A, None, 1)
    assert rows.changes(0, NAMES.__getitem__) is None
    rows.placed(B, PLACE, 2)
    first = rows.changes(0, NAMES.__getitem__)
    assert first is not None
    assert (first["plan"], [row["name"] for row in first["sites"]]) == (None, ["beta"])
    rows.placed(B, dict(PLACE), 3)
    assert rows.changes(2, NAMES.__getitem__) is None
    rows.placed(B, None, 4)
    rows.drawn(DRAWING, 5)
    told = rows.changes(2, NAMES.__getitem__)
    assert told is not None
    assert told["plan"] == {"round": 7, "title": DRAWING.title, "seconds": 12.5, "version": 5}
    assert [(row["name"], row["stage"], row["busy"], row["forward"]) for row in told["sites"]] == [
        ("alpha", 0, 0.5, None),
        ("beta", 1, 0.25, None),
    ]


def test_a_site_is_shown_with_the_stage_that_it_says_it_has() -> None:
    """After the loss of a stage plans count those that are left; and a site may come to another one."""
    rows = PipelineRows()
    rows.drawn(DRAWING, 1)
    rows.placed(B, {**PLACE, "stage": 2}, 2)
    told = rows.changes(0, NAMES.__getitem__)
    assert told is not None
    assert [(row["name"], row["stage"]) for row in told["sites"]] == [("alpha", 0), ("beta", 2)]


def test_steps_take_what_lies_between_the_last_ones() -> None:
    rows = PipelineRows()
    for step, when in ((5, 0.0), (5, 1.0), (7, 10.0), (6, 11.0)):
        assert rows.step_seconds() in (None, 5.0)
        rows.reached(step, when)
    assert rows.step_seconds() == 5.0
    rows.reached(None, 20.0)
    for later in range(PACE):
        rows.reached(8 + later, 12.0 + 2 * later)
    assert rows.step_seconds() == 2.0


def test_a_revoked_site_holds_no_stage_and_its_claims_of_steps_count_no_more() -> None:
    board = Replayed()
    for node in (A, B):
        board.pulse(node, {"place": PLACE, "inner_step": 3 if node == A else 2**40}, alive=True)
    board.apply(Fact(board.now(), "event", B, {"state": "revoked"}))
    for step, board.newest in ((4, 10.0), (5, 12.0)):
        board.pulse(A, {"place": PLACE, "inner_step": step}, alive=True)
    told = board.snapshot()["pipeline"]
    assert [row["node"] for row in told["sites"]] == [A]
    assert told["step_seconds"] == 2.0


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
