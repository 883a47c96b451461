from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coordinator.experts.cases import curves

from pier_coordinator.experts.curves import Curves, fitted, refitted
from pier_coordinator.experts.problem import Array

SIZES, COUNTS = np.array([92e6, 113e6, 134e6]), np.array([1e8, 3e8, 9e8])
PARAMETERS, TOKENS = np.tile(SIZES, 3), np.repeat(COUNTS, 3)


def losses(law: Curves) -> Array:
    """At all sizes and counts, [domains, points]."""
    return np.stack([law.loss(size, count) for size, count in zip(PARAMETERS, TOKENS)], axis=-1)


def test_golden() -> None:
    law = Curves(np.array([1.0]), np.array([100.0]), np.array([50.0]), 0.5, 0.5, 21.0)
    assert law.loss(10_000.0, 100.0).tolist() == pytest.approx([1.0 + 1.0 + 50 / 11])


def test_a_law_is_found_again() -> None:
    law = replace(curves(5), warm=0.3 * 9e8)
    found = fitted(PARAMETERS, TOKENS, losses(law))
    assert (found.alpha, found.beta, found.warm) == (0.34, 0.28, 0.3 * 9e8)
    assert found.data == pytest.approx(law.data, rel=1e-3)
    assert found.size == pytest.approx(law.size, rel=1e-2)


def test_what_does_not_help_has_no_negative_coefficient() -> None:
    """A loss that grows with the model, and with the tokens."""
    worse = 1 + 1e-9 * PARAMETERS + 1e-10 * TOKENS
    found = refitted((0.34, 0.28, 0.0), PARAMETERS, TOKENS, worse[None])
    assert min(found.floor.min(), found.size.min(), found.data.min()) >= 0
    assert found.size.tolist() == [0.0]


def test_a_bootstrap_is_refitted_at_once_and_as_one_by_one() -> None:
    law = (0.34, 0.28, 1e8)
    drawn = losses(curves(4)) + 0.01 * np.random.default_rng(0).standard_normal((7, 4, 9))
    together = refitted(law, PARAMETERS, TOKENS, drawn)
    for index, draw in enumerate(drawn):
        alone = refitted(law, PARAMETERS, TOKENS, draw)
        assert together.data[index] == pytest.approx(alone.data)
        assert together.floor[index] == pytest.approx(alone.floor)


def test_stand_ins_are_scaled_so_that_the_mean_domain_is_balanced() -> None:
    law = curves(6).balanced(1.1e8, 3e8)
    up = 1 + 1e-6
    by_size = (law.loss(1.1e8, 3e8) - law.loss(1.1e8 * up, 3e8)).mean()
    by_data = (law.loss(1.1e8, 3e8) - law.loss(1.1e8, 3e8 * up)).mean()
    assert by_size == pytest.approx(by_data, rel=1e-3)
    assert law.size / curves(6).size == pytest.approx((law.size / curves(6).size).mean()), "one factor for all"
    flat = Curves(np.ones(2), np.zeros(2), np.ones(2), 0.3, 0.3, 1.0).balanced(10.0, 10.0)
    assert flat.size.tolist() == [0.0, 0.0]
