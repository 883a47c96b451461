from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.experts.serving.answer import pick, top

LOGS = np.log([0.1, 0.5, 0.15, 0.25])


def counts(temperature: float, top_p: float, draws: int = 4000) -> list[float]:
    random = np.random.default_rng(1)
    drawn = [pick(LOGS, temperature, top_p, random) for _ in range(draws)]
    return [float(share) for share in np.bincount(drawn, minlength=4) / draws]


def test_temperature_one_draws_as_the_distribution_says() -> None:
    assert counts(1.0, 1.0) == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)


def test_half_the_temperature_squares_the_chances() -> None:
    squares = np.array([0.01, 0.25, 0.0225, 0.0625])
    assert counts(0.5, 1.0) == pytest.approx(squares / squares.sum(), abs=0.03)


@pytest.mark.parametrize(
    ("top_p", "left"), [(0.0, [1]), (0.5, [1]), (0.51, [1, 3]), (0.75, [1, 3]), (0.8, [1, 2, 3]), (0.95, [0, 1, 2, 3])]
)
def test_top_p_leaves_the_fewest_tokens_that_have_so_much(top_p: float, left: list[int]) -> None:
    assert [token for token, share in enumerate(counts(1.0, top_p, 500)) if share] == left


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0, 2, allow_subnormal=True),
    top_p=st.floats(0, 1),
    spread=st.sampled_from([0.0, 1.0, 300.0]),
)
def test_any_setting_gives_a_token_that_is_there(seed: int, temperature: float, top_p: float, spread: float) -> None:
    random = np.random.default_rng(seed)
    logs = random.normal(size=9) * spread
    assert 0 <= pick(logs, temperature, top_p, random) < 9


def test_temperature_zero_takes_the_first_of_the_likeliest() -> None:
    assert pick(np.array([-3.0, -1.0, -1.0]), 0.0, 1.0, np.random.default_rng(0)) == 1


def test_the_top_tokens_come_in_order() -> None:
    assert top(LOGS, 3) == [1, 3, 2]
    assert top(LOGS, 9) == [1, 3, 2, 0]
