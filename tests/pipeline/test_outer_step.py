"""Outer steps of a stage: golden numbers of unequal microbatches, and of a replica that has seen nothing."""

from __future__ import annotations

import numpy as np
import pytest

from pier_node.config import NolocoSection, OuterSection
from pier_node.outer.mean import weighted_mean
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.outer.suspicion import Suspicion
from pier_node.pipeline.outer_step import MeanStep, PairStep, demand_weight, step_of
from pier_node.shared import SharedVector, Vector


def shared(*values: float) -> SharedVector:
    vector = SharedVector(len(values))
    vector.array[:] = values
    return vector


BASE = OuterState(1, (), {ANCHOR: shared(1.0, 2.0), MOMENTUM: shared(0.5, 0.0)}, {})


STEP = MeanStep(0.9, 0.7)


def mean_of(*vectors: Vector) -> Vector:
    mean = np.empty(len(vectors[0]), np.float32)
    weighted_mean(vectors, [np.float32(1)] * len(vectors), mean)
    return mean


def weights(*values: float) -> Vector:
    return np.array(values, np.float32)


def test_replicas_weigh_by_their_microbatches() -> None:
    # Δ = (3·(0.4, 0.8) + 1·(0, −0.4)) / 4 = (0.3, 0.5); M' = 0.9 M + Δ = (0.75, 0.5); φ' = φ − 0.7 (Δ + 0.9 M').
    one = STEP.brought(BASE.anchor, weights(0.6, 1.2), 3)
    other = STEP.brought(BASE.anchor, weights(1.0, 2.4), 1)
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
    own = STEP.brought(BASE.anchor, weights(0.5, 1.5), 4)
    alone, both = (MeanStep(0.9, 1.1).after(BASE, mean_of(*[own] * count))[ANCHOR].array for count in (1, 2))
    assert np.array_equal(alone, both)


@pytest.mark.parametrize("gamma", [0.7, 0.3])
def test_each_of_a_pair_steps_from_its_own_anchor(gamma: float) -> None:
    # θ̄ = (3·(0.6, 1.2) + 1·(0.2, 0.8)) / 4 = (0.5, 1.1), φ̄ = (3·(1, 2) + 1·(0.6, 1.2)) / 4 = (0.9, 1.8);
    # δ' = 0.25 δ − 0.7 (φ̄ − θ̄) + γ (φ̄ − φ), with δ = (0.5, 0): spec/noloco.md section 2.2.
    step = PairStep(NolocoSection(alpha=0.25, beta=0.7, gamma=gamma))
    sent = step.brought(BASE.anchor, weights(0.6, 1.2), 3), step.brought(weights(0.6, 1.2), weights(0.2, 0.8), 1)
    assert len(sent[0]) == (3 if gamma == 0.7 else 5), "anchors travel only if they are needed"
    found = step.after(BASE, mean_of(*sent))
    delta = (0.125 - 0.28 - gamma * 0.1, -0.49 - gamma * 0.2)
    np.testing.assert_allclose(found[MOMENTUM].array, delta, rtol=1e-6)
    np.testing.assert_allclose(found[ANCHOR].array, [1 + delta[0], 2 + delta[1]], rtol=1e-6)


def test_a_pair_that_has_seen_nothing_stays_and_has_the_version_of_the_others() -> None:
    step = PairStep(NolocoSection())
    found = step.after(BASE, mean_of(*[step.brought(BASE.anchor, BASE.anchor, 0)] * 2))
    assert ([*found[ANCHOR].array], [*found[MOMENTUM].array]) == ([1.0, 2.0], [0.5, 0.0])


SEEN, NOTHING = weights(0.5, 0.5, 6.0), weights(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("own", "weight", "sites"), [(SEEN, 2.0, 3), (SEEN, 5.0, 3), (NOTHING, 0.0, 2), (NOTHING, 0.5, 2)]
)
def test_a_mean_says_how_many_microbatches_it_is_of(own: Vector, weight: float, sites: int) -> None:
    demand_weight(weights(0.1, 0.1, weight), own, sites)


@pytest.mark.parametrize(("own", "weight"), [(SEEN, 0.0), (SEEN, 1e-38), (SEEN, 1.9), (SEEN, -4.0), (NOTHING, 0.25)])
def test_a_mean_of_fewer_than_came_here_or_of_parts_of_one_is_refused(own: Vector, weight: float) -> None:
    with pytest.raises(Suspicion, match="microbatches, of which"):
        demand_weight(weights(0.1, 0.1, weight), own, 3)


def test_the_algorithm_is_that_of_the_run() -> None:
    noloco = step_of(OuterSection.model_validate({"algorithm": "noloco"}), 0.5)
    assert (noloco.pairs, step_of(OuterSection(), 0.5).pairs) == (True, False)
