from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.experts.trainer import WORST, judged

PARENT = np.array([1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0]) * math.log(2)


def test_losses_are_bits_per_byte_and_the_gain_is_paired() -> None:
    verdict = judged(PARENT - 0.1 * math.log(2), PARENT)
    assert (verdict.loss, verdict.parent_loss) == pytest.approx((1.9, 2.0))
    assert verdict.standard_error == pytest.approx(0.0, abs=1e-12)  # each row gains as much, however hard it is
    assert verdict.accepted


def test_the_standard_error_is_that_of_a_mean() -> None:
    gains = np.array([0.0, 0.2] * 50) * math.log(2)
    verdict = judged(2.0 - gains, np.full(100, 2.0))
    assert verdict.standard_error == pytest.approx(0.1 / math.sqrt(100), rel=0.1)
    assert verdict.accepted


@pytest.mark.parametrize("losses", [PARENT, PARENT + 0.01, np.where(PARENT > 2, PARENT - 0.9, PARENT + 0.28)])
def test_an_expert_that_is_not_better_by_more_than_chance_is_refused(losses: np.ndarray) -> None:
    assert not judged(losses, PARENT).accepted


def test_a_model_that_ran_away_is_refused_and_its_loss_is_a_number() -> None:
    verdict = judged(np.full(8, np.nan), PARENT)
    assert (verdict.loss, verdict.accepted) == (WORST, False)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20), st.integers(0, 2**31))
def test_nobody_is_better_than_itself(losses: list[float], seed: int) -> None:
    assert not judged(np.array(losses), np.array(losses), seed).accepted
