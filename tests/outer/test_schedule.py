from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rounds.cases import config

from pier_node.config.run import OuterSection, RunConfig
from pier_node.outer.schedule import (
    Kind,
    RoundPlan,
    learning_rate,
    lr_at,
    momentum_at,
    round_plan,
    start_steps,
    total_rounds,
)

APART = (Kind.LOCAL, Kind.PAIR)
STAGED = OuterSection()
COSINE = OuterSection(schedule="cosine")


@pytest.mark.parametrize(
    ("done", "momentum"),
    [(0.05, 0.9), (0.1, 0.99), (0.12, 0.99), (0.15, 0.95), (0.17, 0.95), (0.2, 0.9), (0.5, 0.9), (1.0, 0.9)],
)
def test_staged_momentum(done: float, momentum: float) -> None:
    assert momentum_at(STAGED, done) == momentum


@pytest.mark.parametrize(
    ("done", "lr"),
    [(0.1, 0.0), (0.15, 0.55), (0.19, 0.99), (0.2, 1.1), (0.5, 1.1), (0.79, 1.1), (0.8, 0.9), (0.81, 0.9), (1.0, 0.9)],
)
def test_staged_lr(done: float, lr: float) -> None:
    assert lr_at(STAGED, done) == pytest.approx(lr, abs=1e-12)


@pytest.mark.parametrize(
    ("done", "momentum", "lr"),
    [
        (0.1, 0.99, 0.0),
        (0.15, 0.90 + 0.045 * (1 + math.cos(math.pi * 0.05 / 0.9)), 0.55),
        (0.2, 0.90 + 0.045 * (1 + math.cos(math.pi / 9)), 1.1),
        (0.55, 0.945, None),
        (0.6, None, 1.0),
        (1.0, 0.9, 0.9),
    ],
)
def test_cosine(done: float, momentum: float | None, lr: float | None) -> None:
    if momentum is not None:
        assert momentum_at(COSINE, done) == pytest.approx(momentum, abs=1e-7)
    if lr is not None:
        assert lr_at(COSINE, done) == pytest.approx(lr, abs=1e-7)


@given(st.floats(0, 1), st.floats(0, 0.95))
def test_schedules_stay_within_their_bounds_wherever_the_start_ends(done: float, fraction: float) -> None:
    for schedule in ("staged", "cosine"):
        outer = OuterSection(schedule=schedule, start="none", start_fraction=fraction)
        assert 0.9 <= momentum_at(outer, done) <= 0.99
        assert 0.0 <= lr_at(outer, done) <= 1.1


@given(st.floats(0, 1), st.floats(0, 0.99), st.floats(0.01, 2))
def test_constant(done: float, momentum: float, lr: float) -> None:
    outer = OuterSection(schedule="constant", momentum=momentum, lr=lr)
    assert (momentum_at(outer, done), lr_at(outer, done)) == (momentum, lr)


def pier(**outer: Any) -> RunConfig:
    return config(run={"sites": 4}, inner={"total_steps": 1000}, inner_steps=50, **outer)


def test_solo_start() -> None:
    run = pier()
    assert (start_steps(run), total_rounds(run)) == (100, 20)
    assert round_plan(run, 2) == RoundPlan(2, Kind.SOLO, 50, 50, 0.9, 0.0, True, 1)
    plan = round_plan(run, 3)
    assert plan == RoundPlan(3, Kind.LOCAL, 100, 50, 0.95, plan.lr, False, 4)
    assert plan.lr == pytest.approx(0.55)
    assert round_plan(run, 4).sites == 1
    assert round_plan(run, 20).lr == 0.9


def test_sync_start_is_a_round_a_step_and_gathers_momentum_once_an_interval() -> None:
    run = pier(start="sync")
    assert (start_steps(run), total_rounds(run)) == (100, 118)
    assert round_plan(run, 1) == RoundPlan(1, Kind.SYNC, 0, 1, 0.9, 0.0, True, 4)
    assert [round_plan(run, number).momentum for number in (2, 50, 51, 52)] == [1.0, 1.0, 0.9, 1.0]
    plan = round_plan(run, 101)
    assert plan == RoundPlan(101, Kind.LOCAL, 100, 50, 0.95, plan.lr, False, 1)


def test_plain_algorithms() -> None:
    diloco, sync = pier(algorithm="diloco"), pier(algorithm="sync")
    assert round_plan(diloco, 1) == RoundPlan(1, Kind.LOCAL, 0, 50, 0.9, 0.7, False, 4)
    noloco = pier(algorithm="noloco")
    assert round_plan(noloco, 2) == RoundPlan(2, Kind.PAIR, 50, 50, 0.0, 0.0, False, 1)
    assert total_rounds(sync) == 1000
    assert round_plan(sync, 1000) == RoundPlan(1000, Kind.SYNC, 999, 1, 0.0, 0.0, False, 1)


@pytest.mark.parametrize(
    ("done", "momentum", "lr"), [(0.1, 0.8, 0.6), (0.75, 0.8, 0.6), (0.875, 0.4, 0.8), (1.0, 0.0, 1.0)]
)
def test_annealed_in_the_last_quarter(done: float, momentum: float, lr: float) -> None:
    outer = OuterSection(schedule="anneal", momentum=0.8, lr=0.6)
    assert momentum_at(outer, done) == pytest.approx(momentum)
    assert lr_at(outer, done) == pytest.approx(lr)


def test_no_momentum_without_its_warmup() -> None:
    plan = round_plan(pier(momentum_warmup=False), 1)
    assert (plan.kind, plan.momentum, plan.warmup) == (Kind.SOLO, 0.0, False)


@given(
    st.integers(1, 400),
    st.integers(1, 60),
    st.sampled_from(["solo", "sync", "none"]),
    st.sampled_from(["pier", "diloco", "noloco", "sync"]),
    st.floats(0.01, 0.9),
)
def test_rounds_cover_every_step_once_and_start_once(
    steps: int, every: int, start: str, algorithm: str, fraction: float
) -> None:
    assume(algorithm != "sync" or start == "none")
    assume(algorithm != "noloco" or start != "sync")
    outer: dict[str, Any] = {"algorithm": algorithm, "inner_steps": every, "start": start, "start_fraction": fraction}
    run = config(run={"sites": 3}, inner={"total_steps": steps}, **outer)
    plans = [round_plan(run, number) for number in range(1, total_rounds(run) + 1)]
    assert [step for plan in plans for step in range(plan.first_step, plan.first_step + plan.steps)] == [*range(steps)]
    exchanging = [plan for plan in plans if plan.kind is not Kind.SOLO]
    assert [plan.sites for plan in exchanging] == [3, *[1] * len(exchanging)][: len(exchanging)]
    assert [plan.kind for plan in plans] == sorted((plan.kind for plan in plans), key=lambda kind: kind in APART)
    assert start_steps(run) % every == 0 or start_steps(run) == steps


def test_noloco_at_the_size_of_its_paper() -> None:
    """NoLoCo (arXiv 2506.10911): 500 rounds, at the inner steps 50, 100, … 25 000, and the paper's inner rates."""
    inner = {"total_steps": 25_000, "warmup_steps": 1000, "lr": 6e-4, "min_lr": 6e-5}
    run = config(run={"sites": 16}, inner=inner, algorithm="noloco")
    plans = [round_plan(run, number) for number in range(1, total_rounds(run) + 1)]
    assert [plan.first_step + plan.steps for plan in plans] == [*range(50, 25_001, 50)]
    assert [plan.sites for plan in plans] == [16] + [1] * 499
    rates = {step: learning_rate(step, run.inner) for step in (0, 999, 13_000, 25_000)}
    assert rates == pytest.approx({0: 6e-7, 999: 6e-4, 13_000: 0.55 * 6e-4, 25_000: 6e-5})
