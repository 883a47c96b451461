from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import config, fp32

from pier_node.base.errors import PierError
from pier_node.outer.mean import NORM_LIMIT, Update, norm_limit, worth_sending
from pier_node.outer.schedule import round_plan
from pier_node.outer.state import l2_norm

SOLO, LOCAL = (round_plan(config(inner={"total_steps": 40}, inner_steps=4), number) for number in (1, 2))


@given(st.lists(st.floats(-1e6, 1e6), max_size=9))
def test_a_contribution_may_be_a_hundred_times_as_long_as_the_model(anchor: list[float]) -> None:
    assert norm_limit(l2_norm(fp32(*anchor))) == pytest.approx(NORM_LIMIT * max(1.0, math.hypot(*anchor)), rel=1e-5)


def test_a_decent_one_is_sent_as_it_is() -> None:
    error = np.zeros(2, np.float32)
    update = Update(fp32(300.0, 400.0), 7, error)
    assert worth_sending(LOCAL, update, 5.0) is update


@pytest.mark.parametrize("wild", [501.0, math.nan, math.inf])
def test_a_wild_one_is_dropped_and_told(wild: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        sent = worth_sending(LOCAL, Update(fp32(wild, 0.0), 7), 5.0)
    assert (sent.vector.tolist(), sent.tokens) == ([0.0, 0.0], 0)
    assert "lower inner.lr" in caplog.text


def test_a_solo_start_brings_weights_of_any_length_but_no_nan() -> None:
    far = Update(fp32(1e9, 0.0), 7)
    assert worth_sending(SOLO, far, 0.0) is far
    with pytest.raises(PierError, match="diverged"):
        worth_sending(SOLO, Update(fp32(math.nan, 0.0), 7), 0.0)
