"""A replica that steps by itself: what it keeps, what it brings to an outer round, and what it continues from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pipeline.cases import config

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.codec import codec
from pier_node.outer.state import ADAM_M, ANCHOR, MOMENTUM
from pier_node.pipeline.beginnings import made
from pier_node.pipeline.outer_step import MeanStep
from pier_node.pipeline.stage_state import BASE, MICROBATCHES, StageState
from pier_node.pipeline.vote_state import VoteState, version
from pier_proto.v1.peer_pb2 import Total

RUN = RunConfig.model_validate(config().model_dump(mode="json") | {"outer": {"algorithm": "pier", "start": "none"}})
STEP, CODED = MeanStep(0.9, 0.7), MeanStep(0.9, 0.7, codec("int4"))
FIRST, SECOND, OUTER = version(1, 7), version(2, 7), version(3, 7)


def voted(counted: int, stage: int = 0) -> VoteState:
    return VoteState(2, 3.0, (0, stage, 0, 0), counted=counted)


def gradient(seed: int, length: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(length).astype(np.float32)


@pytest.fixture
def stage_state(tmp_path: Path) -> StageState:
    """Two steps of 3 and 2 microbatches count."""
    found = StageState(tmp_path, RUN)
    found.hold(1)
    for number, (name, microbatches) in enumerate(((FIRST, 3), (SECOND, 2))):
        length = len(made(RUN, 1))
        found.step_apart(gradient(number, length), Total(square=1.0), number, name, microbatches)
        assert found.settle(voted(name), number + 1)
    return found


def test_steps_apart_leave_the_version_that_replicas_share(stage_state: StageState) -> None:
    assert stage_state.state is not None
    assert stage_state.done is not None
    assert (stage_state.version, stage_state.done.round, stage_state.done.adam_step) == (0, SECOND, 2)
    assert stage_state.done.ledger == {BASE: 0, MICROBATCHES: 5}
    assert np.array_equal(stage_state.state.anchor, made(RUN, 1))
    assert not np.array_equal(stage_state.working.anchor, stage_state.state.anchor)


def test_it_brings_what_it_moved_by_times_its_microbatches(stage_state: StageState) -> None:
    assert stage_state.state is not None
    expected = 5 * (stage_state.state.anchor - stage_state.working.anchor)
    np.testing.assert_allclose(stage_state.brought(STEP).sent(), [*expected, 5.0], rtol=1e-6)


def met(stage_state: StageState) -> Vector:
    assert stage_state.state is not None
    tensors = STEP.after(stage_state.state, stage_state.brought(STEP).sent())
    stage_state.meet(tensors, OUTER, None)
    return tensors[ANCHOR].array


def test_after_an_outer_round_it_goes_on_from_the_common_state_with_its_own_moments(stage_state: StageState) -> None:
    moments = stage_state.working.tensors[ADAM_M].array.copy()
    anchor = met(stage_state)
    assert stage_state.version == 0
    assert stage_state.settle(voted(OUTER, OUTER), 3)
    assert stage_state.state is not None
    assert (stage_state.version, {*stage_state.state.tensors}) == (OUTER, {ANCHOR, MOMENTUM})
    assert np.array_equal(stage_state.working.anchor, anchor)
    assert np.array_equal(stage_state.working.tensors[ADAM_M].array, moments)
    assert (stage_state.working.adam_step, stage_state.working.ledger[MICROBATCHES]) == (2, 0)
    assert not stage_state.brought(STEP).sent()[:-1].any()


def test_an_outer_round_that_does_not_count_changes_nothing(stage_state: StageState, tmp_path: Path) -> None:
    before = stage_state.working.anchor.copy()
    met(stage_state)
    assert not stage_state.settle(voted(SECOND), 3)
    assert stage_state.version == 0
    assert np.array_equal(stage_state.working.anchor, before)
    back = StageState(tmp_path, RUN)
    back.own.resume(3, SECOND, 2)
    assert back.load(0)
    assert np.array_equal(back.working.anchor, before)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_what_a_codec_dropped_is_brought_again_if_the_outer_round_counts(
    stage_state: StageState, tmp_path: Path, counts: bool, restarted: bool
) -> None:
    before = stage_state.brought(CODED).sent().copy()
    error = SharedVector(len(before))
    error.array[:] = np.arange(len(before))
    assert stage_state.state
    stage_state.meet(CODED.after(stage_state.state, before), OUTER, error)
    now = voted(OUTER, OUTER) if counts else voted(SECOND)
    if restarted:
        stage_state = StageState(tmp_path, RUN)
        stage_state.own.resume(2, SECOND, 2)
    stage_state.settle(now, 3)
    assert stage_state.load(now.versions[1])
    assert np.array_equal(stage_state.brought(CODED).sent(), error.array if counts else before)
    assert not counts or not stage_state.brought(STEP).sent().any(), "a codec that drops nothing brings nothing again"


def test_after_a_start_the_version_decides_what_it_goes_on_from(stage_state: StageState, tmp_path: Path) -> None:
    anchor = met(stage_state)
    back = StageState(tmp_path, RUN)
    back.own.resume(2, SECOND, 2)
    back.settle(voted(OUTER, OUTER), 3)
    assert back.load(OUTER)
    assert np.array_equal(back.working.anchor, anchor)
    assert back.working.adam_step == 2


def test_what_went_astray_is_not_brought_and_forgotten(
    stage_state: StageState, caplog: pytest.LogCaptureFixture
) -> None:
    stage_state.working.anchor[0] = np.inf
    assert not stage_state.brought(STEP).sent().any()
    assert stage_state.done is None
    assert "this replica's update is dropped" in caplog.text
