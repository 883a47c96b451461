"""The step that a site keeps before it says that it is ready: clipped by all stages, beside the state that counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pipeline.cases import config

from pier_node.base.shared import Vector
from pier_node.outer.inner_optimizer import step_vectors
from pier_node.pipeline.beginnings import made
from pier_node.pipeline.stage import stage_layout
from pier_node.pipeline.stage_state import ABSENT, StageState
from pier_proto.v1.peer_pb2 import Total

RUN = config()
LENGTH = stage_layout(RUN.model, 4, 1).length


@pytest.fixture
def stage_state(tmp_path: Path) -> StageState:
    made = StageState(tmp_path, RUN)
    assert (made.stage, made.version) == (None, ABSENT)
    made.hold(1)
    return made


def gradient() -> Vector:
    return np.random.default_rng(1).standard_normal(LENGTH).astype(np.float32)


@pytest.mark.parametrize("square", [0.25, 400.0])
def test_a_step_is_adamw_with_the_gradient_clipped_by_the_norm_of_all_stages(
    stage_state: StageState, square: float
) -> None:
    stepped = stage_state.stepped(gradient(), Total(square=square), 0, 7 << 24)
    weights, first, second = torch.from_numpy(made(RUN, 1)), torch.zeros(LENGTH), torch.zeros(LENGTH)
    factor = 1.0 if square < 1 else 1.0 / (20.0 + 1e-6)
    inner = RUN.inner.model_copy(update={"clip_norm": 0.0})
    flat = torch.from_numpy(gradient() * np.float32(factor))
    step_vectors(stage_layout(RUN.model, 4, 1), weights, (first, second, 0), flat, 0, inner)
    np.testing.assert_allclose(stepped.anchor, weights.numpy(), rtol=1e-6, atol=1e-8)
    assert stepped.adam_step == 1
    assert stage_state.state is not None
    assert np.array_equal(stage_state.state.anchor, made(RUN, 1)), "the state changed before the round decided"


def test_what_counts_stays_on_the_disk_however_many_attempts_fail(stage_state: StageState, tmp_path: Path) -> None:
    stage_state.state = stage_state.stepped(gradient(), Total(square=1.0), 0, 3 << 24)
    for round in (4, 5, 6):
        stage_state.stepped(gradient(), Total(square=1.0), 1, round << 24)
    back = StageState(tmp_path, RUN)
    assert back.stage == 1
    assert back.load(3 << 24)
    assert back.version == 3 << 24
    assert back.state is not None
    assert np.array_equal(back.state.anchor, stage_state.state.anchor)
    assert back.load(6 << 24)


def test_what_is_not_here_is_not_made_up(stage_state: StageState) -> None:
    assert not stage_state.load(9 << 24)
    assert stage_state.version == 0
    assert stage_state.load(0)
