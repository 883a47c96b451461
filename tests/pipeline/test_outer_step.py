"""Outer steps of a stage: golden numbers of unequal microbatches, and of a replica that has seen nothing."""

from __future__ import annotations

import numpy as np
import pytest
from rounds.cases import fp32, shared

from pier_node.base.shared import Vector
from pier_node.config.run import NolocoSection, OuterSection
from pier_node.outer.codec import codec
from pier_node.outer.mean import weighted_mean
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.outer_step import MeanStep, PairStep, demand_weight, step_of
from pier_node.rounds.suspects import Suspicion

BASE = OuterState(1, (), {ANCHOR: shared([1.0, 2.0]), MOMENTUM: shared([0.5, 0.0])}, {})


STEP = MeanStep(0.9, 0.7)


def mean_of(*vectors: Vector) -> Vector:
    mean = np.empty(len(vectors[0]), np.float32)
    weighted_mean(vectors, [np.float32(1)] * len(vectors), mean)
    return mean


def test_replicas_weigh_by_their_microbatches() -> None:
    # Δ = (3·(0.4, 0.8) + 1·(0, −0.4)) / 4 = (0.3, 0.5); M' = 0.9 M + Δ = (0.75, 0.5); φ' = φ − 0.7 (Δ + 0.9 M').
    one = STEP.brought(BASE.anchor, fp32(0.6, 1.2), 3)
    other = STEP.brought(BASE.anchor, fp32(1.0, 2.4), 1)
    nothing = STEP.brought(BASE.anchor, BASE.anchor, 0)
    for sent in ((one, other), (one, nothing, other)):
        found = STEP.after(BASE, mean_of(*sent))
        np.testing.assert_allclose(found[MOMENTUM].array, [0.75, 0.5], rtol=1e-6)
        np.testing.assert_allclose(found[ANCHOR].array, [1 - 0.7 * 0.975, 2 - 0.7 * 0.95], rtol=1e-6)
    assert [*BASE.anchor] == [1.0, 2.0]


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_stage_of_which_nobody_has_seen_anything_stays(replicas: int) -> None:
    assert STEP.after(BASE, mean_of(*[STEP.brought(BASE.anchor, BASE.anchor, 0)] * replicas)) == {}


def test_one_replica_takes_the_same_step_as_two_equal_ones() -> None:
    own = STEP.brought(BASE.anchor, fp32(0.5, 1.5), 4)
    alone, both = (MeanStep(0.9, 1.1).after(BASE, mean_of(*[own] * count))[ANCHOR].array for count in (1, 2))
    assert np.array_equal(alone, both)


@pytest.mark.parametrize("gamma", [0.7, 0.3])
def test_each_of_a_pair_steps_from_its_own_anchor(gamma: float) -> None:
    # θ̄ = (0.4, 1), φ̄ = (0.8, 1.6), whatever each has seen;
    # δ' = 0.25 δ − 0.7 (φ̄ − θ̄) + γ (φ̄ − φ), with δ = (0.5, 0): arXiv 2506.10911.
    step = PairStep(NolocoSection(alpha=0.25, beta=0.7, gamma=gamma))
    sent = step.brought(BASE.anchor, fp32(0.6, 1.2), 3), step.brought(fp32(0.6, 1.2), fp32(0.2, 0.8), 1)
    assert len(sent[0]) == (2 if gamma == 0.7 else 4), "anchors travel only if they are needed"
    found = step.after(BASE, mean_of(*sent))
    delta = (0.125 - 0.28 - gamma * 0.2, -0.42 - gamma * 0.4)
    np.testing.assert_allclose(found[MOMENTUM].array, delta, rtol=1e-6)
    np.testing.assert_allclose(found[ANCHOR].array, [1 + delta[0], 2 + delta[1]], rtol=1e-6)


def stage(anchor: Vector, momentum: Vector) -> OuterState:
    return OuterState(1, (), {ANCHOR: shared(anchor), MOMENTUM: shared(momentum)}, {})


@pytest.mark.parametrize(
    ("gamma", "momenta", "anchors"),
    [
        (0.7, [[0.45, 0.675, -0.475], [-1.2, -0.225, 0.775]], [[1.45, -1.325, 0.025], [1.8, -0.225, -0.725]]),
        (0.3, [[0.05, 0.275, -0.075], [-0.8, 0.175, 0.375]], [[1.05, -1.725, 0.425], [2.2, 0.175, -1.125]]),
    ],
)
def test_the_numbers_of_two_replicas_are_noloco_s(
    gamma: float, momenta: list[list[float]], anchors: list[list[float]]
) -> None:
    step = PairStep(NolocoSection(alpha=0.5, beta=0.7, gamma=gamma))
    bases = stage(fp32(1, -2, 0.5), fp32(0.2, -0.4, 0.1)), stage(fp32(3, 0, -1.5), fp32(-0.3, 0.6, -0.2))
    trained = fp32(0.6, -1, 0.25), fp32(2.4, -0.5, -0.75)
    sent = [step.brought(base.anchor, it, seen) for base, it, seen in zip(bases, trained, (9, 1), strict=True)]
    for base, momentum, anchor in zip(bases, momenta, anchors, strict=True):
        found = step.after(base, mean_of(*sent))
        np.testing.assert_allclose(found[MOMENTUM].array, momentum, atol=1e-6)
        np.testing.assert_allclose(found[ANCHOR].array, anchor, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.7, 0.3])
def test_who_saw_more_does_not_move_the_mean_anchor(gamma: float) -> None:
    step = PairStep(NolocoSection(gamma=gamma))
    bases = [stage(fp32(first, second), fp32(0, 0)) for first, second in ((1, 2), (5, -2))]
    mean = mean_of(*(step.brought(base.anchor, base.anchor, seen) for base, seen in zip(bases, (9, 1), strict=True)))
    after = [step.after(base, mean)[ANCHOR].array for base in bases]
    np.testing.assert_allclose(sum(after) / 2, [3, 0], atol=1e-6)
    assert abs(after[0] - after[1]).max() < 4, "they come nearer"


SEEN, NOTHING = fp32(0.5, 0.5, 6.0), fp32(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("own", "weight", "sites"), [(SEEN, 2.0, 3), (SEEN, 5.0, 3), (NOTHING, 0.0, 2), (NOTHING, 0.5, 2)]
)
def test_a_mean_says_how_many_microbatches_it_is_of(own: Vector, weight: float, sites: int) -> None:
    demand_weight(fp32(0.1, 0.1, weight), own, sites)


@pytest.mark.parametrize(("own", "weight"), [(SEEN, 0.0), (SEEN, 1e-38), (SEEN, 1.9), (SEEN, -4.0), (NOTHING, 0.25)])
def test_a_mean_of_fewer_than_came_here_or_of_parts_of_one_is_refused(own: Vector, weight: float) -> None:
    with pytest.raises(Suspicion, match="microbatches, of which"):
        demand_weight(fp32(0.1, 0.1, weight), own, 3)


def test_the_algorithm_is_that_of_the_run() -> None:
    noloco = step_of(OuterSection.model_validate({"algorithm": "noloco"}), 0.5)
    assert (noloco.pairs, step_of(OuterSection(), 0.5).pairs) == (True, False)
    for algorithm in ("pier", "noloco"):
        coded = OuterSection.model_validate({"algorithm": algorithm, "codec": "int8"})
        assert step_of(coded, 0.5).codec.name == codec("int8").name
