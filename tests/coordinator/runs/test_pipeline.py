"""A pipeline as the coordinator knows it, of pulses and drawings."""

from __future__ import annotations

import json
from typing import Any

from coordinator.played import Replayed
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.runs.drawing import Drawing
from pier_coordinator.runs.pipeline import PACE, PipelineRows, PlaceRow
from pier_node.config.run import SITES

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
