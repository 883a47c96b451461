"""From one state to the next: what Pier equals in its special cases, on whole states."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from rounds.cases import shared

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer import state as states
from pier_node.outer.advance import advance
from pier_node.outer.inner_optimizer import Moments, take_step
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import Kind, RoundPlan, round_plan
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState, Piece

TOKENS = {"b": 30, "a": 10}


def config(**outer: Any) -> RunConfig:
    tables = {"model": {"preset": "llama-tiny"}, "inner": {"total_steps": 40, "warmup_steps": 2}, "outer": outer}
    return RunConfig.model_validate(tables)


CONFIG = config(inner_steps=4, start="sync", start_fraction=0.2)
LAYOUT = Layout.of(CONFIG.model)


def state(anchor: Any, momentum: Any, **more: SharedVector) -> OuterState:
    return OuterState(4, ("a",), {ANCHOR: shared(anchor), MOMENTUM: shared(momentum), **more}, {"a": 5})


def plan(kind: Kind, momentum: float, lr: float = 0.0, warmup: bool = False, first: int = 0) -> RoundPlan:
    return RoundPlan(5, kind, first, 1, momentum, lr, warmup, sites=1)


def step(before: OuterState, mean: Any, what: RoundPlan) -> OuterState:
    return advance(before, shared(mean), TOKENS, what, LAYOUT, CONFIG.inner)


def test_the_golden_step() -> None:
    after = step(state([1.0, -2.0], [0.1, 0.2]), [0.2, -0.3], plan(Kind.LOCAL, 0.9, 1.1))
    assert after.momentum == pytest.approx([0.29, -0.12], abs=1e-7)
    assert after.anchor == pytest.approx([0.4929, -1.5512], abs=1e-6)


def test_round_members_and_ledger_go_on() -> None:
    after = step(state([0.0], [0.0]), [0.0], plan(Kind.LOCAL, 0.9, 1.0))
    assert (after.round, after.members, dict(after.ledger)) == (5, ("a", "b"), {"a": 15, "b": 30})


def test_the_state_before_is_not_touched() -> None:
    before = state([1.0, 2.0], [3.0, 4.0])
    digest = OuterState(4, ("a",), before.tensors, {"a": 5}).digest
    step(before, [0.5, 0.5], plan(Kind.LOCAL, 0.9, 1.0))
    assert OuterState(4, ("a",), before.tensors, {"a": 5}).digest == digest


def test_the_mean_becomes_a_part_of_the_next_state_if_it_is_one_of_the_whole_model() -> None:
    before, mean = state([1.0, 2.0], [3.0, 4.0]), shared([0.5, 0.5])
    for kind, name in ((Kind.LOCAL, MOMENTUM), (Kind.SOLO, ANCHOR)):
        assert advance(before, mean, TOKENS, plan(kind, 0.9, 1.0), LAYOUT, CONFIG.inner).tensors[name] is mean
    half = replace(plan(Kind.LOCAL, 0.9, 1.0), fragment=1, fragments=2)
    after = advance(before, shared([0.5]), TOKENS, half, LAYOUT, CONFIG.inner)
    assert after.momentum == pytest.approx([3.0, 0.9 * 4.0 + 0.5])


def test_only_the_fragment_of_a_round_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE", 8)
    monkeypatch.setattr("pier_node.outer.schedule.PIECE", 8)
    rng = np.random.default_rng(4)
    before, measured = state(*rng.normal(size=(2, 45)).astype(np.float32)), list[Vector]()
    assert before.norm

    def of(values: Vector) -> Piece:
        measured.append(values)
        return Piece(sha256(values.tobytes()).digest(), float(np.dot(values, values)))

    monkeypatch.setattr(Piece, "of", of)
    third = replace(plan(Kind.LOCAL, 0.9, 1.0), fragment=1, fragments=3)
    part = third.span(45)
    after = step(before, np.ones(part.stop - part.start), third)
    for values, former in ((after.anchor, before.anchor), (after.momentum, before.momentum)):
        assert [*np.flatnonzero(values != former)] == [*range(part.start, part.stop)]
    assert len(measured) == 2 * 2, f"pieces of 8 in {part}, of two tensors"
    fresh = OuterState(after.round, after.members, after.tensors, after.ledger)
    assert (fresh.digest, fresh.norm) == (after.digest, after.norm)


def test_no_momentum_and_full_rate_is_the_identity() -> None:
    rng = np.random.default_rng(1)
    anchor, weights = rng.normal(size=(2, 64)).astype(np.float32)
    after = step(state(anchor, np.zeros(64)), anchor - weights, plan(Kind.LOCAL, 0.0, 1.0))
    np.testing.assert_allclose(after.anchor, weights, rtol=0, atol=2e-7)


def test_a_solo_round_takes_the_weights_to_the_last_bit() -> None:
    rng = np.random.default_rng(2)
    anchor, weights, momentum = rng.normal(size=(3, 64)).astype(np.float32)
    after = step(state(anchor, momentum), weights, plan(Kind.SOLO, 0.9, warmup=True))
    assert after.anchor.tobytes() == weights.tobytes()
    np.testing.assert_array_equal(after.momentum, np.float32(0.9) * momentum + (anchor - weights))


def test_without_warmup_a_start_gathers_nothing() -> None:
    for kind, mean in ((Kind.SOLO, np.ones(LAYOUT.length)), (Kind.SYNC, np.ones(LAYOUT.length))):
        after = step(state(np.zeros(LAYOUT.length), np.zeros(LAYOUT.length)), mean, plan(kind, 0.0))
        assert not after.momentum.any()


def test_a_synchronous_start_is_adamw_to_the_last_bit_and_gathers_what_it_moved_by() -> None:
    """Phase 1 over two intervals of four steps against AdamW on tensors of their own; M = Δ₂ + 0.9·Δ₁."""
    rng = np.random.default_rng(3)
    weights = torch.from_numpy(rng.normal(size=LAYOUT.length).astype(np.float32) * 0.02)
    now = OuterState(0, ("a",), {ANCHOR: shared(weights.numpy()), MOMENTUM: SharedVector(LAYOUT.length)}, {})
    own = {name: torch.nn.Parameter(view.clone()) for name, view in LAYOUT.views(weights).items()}
    first, second = ({name: torch.zeros_like(view) for name, view in own.items()} for _ in range(2))
    boundaries = [now.anchor.copy()]
    for number in range(1, 9):
        gradient = rng.normal(size=LAYOUT.length).astype(np.float32)
        for name, view in LAYOUT.views(torch.from_numpy(gradient.copy())).items():
            own[name].grad = view
        take_step(own, Moments(first, second, number - 1), number - 1, CONFIG.inner)
        now = advance(now, shared(gradient), {"a": 1}, round_plan(CONFIG, number), LAYOUT, CONFIG.inner)
        if number % 4 == 0:
            boundaries.append(now.anchor.copy())
    flat = torch.empty(LAYOUT.length)
    LAYOUT.store({name: parameter.detach() for name, parameter in own.items()}, flat)
    assert now.anchor.tobytes() == flat.numpy().tobytes()
    assert now.adam_step == 8
    wanted = (boundaries[1] - boundaries[2]) + np.float32(0.9) * (boundaries[0] - boundaries[1])
    np.testing.assert_allclose(now.momentum, wanted, rtol=0, atol=1e-7)


def test_the_first_local_round_drops_the_moments() -> None:
    moments = {ADAM_M: shared([1.0]), ADAM_V: shared([1.0])}
    after = step(state([0.0], [0.0], **moments), [0.0], plan(Kind.LOCAL, 0.9, 1.0))
    assert set(after.tensors) == {ANCHOR, MOMENTUM}
    assert after.adam_step == 0


def test_who_is_alone_keeps_its_weights_to_the_last_bit_if_the_step_is_the_identity() -> None:
    before, weights = state([1.0, -3.0], [0.0, 0.0]), np.array([1e-9, 7.0], np.float32)

    def after(lr: float, alone: Vector | None) -> list[float]:
        plan = round_plan(config(algorithm="diloco", momentum=0.0, lr=lr), 1)
        mean = shared(before.anchor - weights)
        return list(advance(before, mean, {"a": 5}, plan, LAYOUT, CONFIG.inner, alone).anchor)

    assert after(1.0, None) == [0.0, 7.0], "rounded"
    assert after(1.0, weights) == [*weights]
    assert after(0.5, weights) == [0.5, 2.0]
    stale = np.array([0.5, 7.0], np.float32)  # of steps before it caught up with another state
    assert after(1.0, stale) == [0.0, 7.0]
