"""A replica that steps by itself: what it keeps, what it brings to an outer round, and what it goes on from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pipeline.cases import config

from pier.v1.peer_pb2 import Total
from pier_node.config import RunConfig
from pier_node.outer.state import ADAM_M, ANCHOR, MOMENTUM
from pier_node.pipeline.outer_step import MeanStep
from pier_node.pipeline.own import BASE, MICROBATCHES
from pier_node.pipeline.tally import Standing, version
from pier_node.pipeline.vault import Vault, made
from pier_node.shared import Vector

RUN = RunConfig.model_validate(config().model_dump(mode="json") | {"outer": {"algorithm": "pier", "start": "none"}})
STEP = MeanStep(0.9, 0.7)
FIRST, SECOND, OUTER = version(1, 7), version(2, 7), version(3, 7)


def standing(counted: int, stage: int = 0) -> Standing:
    return Standing(2, 3.0, (0, stage, 0, 0), counted=counted)


def gradient(seed: int, length: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(length).astype(np.float32)


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    """Two steps of 3 and 2 microbatches count."""
    found = Vault(tmp_path, RUN)
    found.hold(1)
    for number, (name, microbatches) in enumerate(((FIRST, 3), (SECOND, 2))):
        length = len(made(RUN, 1))
        found.step_apart(gradient(number, length), Total(square=1.0), number, name, microbatches)
        assert found.settle(standing(name), number + 1)
    return found


def test_steps_apart_leave_the_version_that_replicas_share(vault: Vault) -> None:
    assert vault.state is not None
    assert vault.done is not None
    assert (vault.version, vault.done.round, vault.done.adam_step) == (0, SECOND, 2)
    assert vault.done.ledger == {BASE: 0, MICROBATCHES: 5}
    assert np.array_equal(vault.state.anchor, made(RUN, 1))
    assert not np.array_equal(vault.working.anchor, vault.state.anchor)


def test_it_brings_what_it_moved_by_times_its_microbatches(vault: Vault) -> None:
    assert vault.state is not None
    expected = 5 * (vault.state.anchor - vault.working.anchor)
    np.testing.assert_allclose(vault.brought(STEP), [*expected, 5.0], rtol=1e-6)


def met(vault: Vault) -> Vector:
    assert vault.state is not None
    tensors = STEP.after(vault.state, vault.brought(STEP))
    vault.meet(tensors, OUTER)
    return tensors[ANCHOR].array


def test_after_an_outer_round_it_goes_on_from_the_common_state_with_its_own_moments(vault: Vault) -> None:
    moments = vault.working.tensors[ADAM_M].array.copy()
    anchor = met(vault)
    assert vault.version == 0
    assert vault.settle(standing(OUTER, OUTER), 3)
    assert vault.state is not None
    assert (vault.version, {*vault.state.tensors}) == (OUTER, {ANCHOR, MOMENTUM})
    assert np.array_equal(vault.working.anchor, anchor)
    assert np.array_equal(vault.working.tensors[ADAM_M].array, moments)
    assert (vault.working.adam_step, vault.working.ledger[MICROBATCHES]) == (2, 0)
    assert not vault.brought(STEP)[:-1].any()


def test_an_outer_round_that_does_not_count_changes_nothing(vault: Vault, tmp_path: Path) -> None:
    before = vault.working.anchor.copy()
    met(vault)
    assert not vault.settle(standing(SECOND), 3)
    assert vault.version == 0
    assert np.array_equal(vault.working.anchor, before)
    back = Vault(tmp_path, RUN)
    back.own.resume(3)
    assert back.load(0)
    assert np.array_equal(back.working.anchor, before)


def test_after_a_start_the_version_decides_what_it_goes_on_from(vault: Vault, tmp_path: Path) -> None:
    anchor = met(vault)
    back = Vault(tmp_path, RUN)
    back.own.resume(2)
    back.settle(standing(OUTER, OUTER), 3)
    assert back.load(OUTER)
    assert np.array_equal(back.working.anchor, anchor)
    assert back.working.adam_step == 2


def test_what_went_astray_is_not_brought_and_forgotten(vault: Vault, caplog: pytest.LogCaptureFixture) -> None:
    vault.working.anchor[0] = np.inf
    assert not vault.brought(STEP).any()
    assert vault.done is None
    assert "this replica's update is dropped" in caplog.text
