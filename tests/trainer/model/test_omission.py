"""Which stages are left out, and that their blocks are not used."""

from __future__ import annotations

import numpy as np
import pytest
from pipeline.cases import config

from pier_node.pipeline.stage import stage_blocks
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.omission import MOST, choices, early_exits, omissions


def test_any_stage_but_the_first_is_left_out() -> None:
    assert choices(4, 1) == [(1,), (2,), (3,)]
    assert choices(4, 2) == [(1, 2), (1, 3), (2, 3)]
    assert choices(4, 0) == [()]
    assert early_exits(4) == [(3,), (2, 3), (1, 2, 3)]
    assert 1 < len(choices(20, 10)) <= MOST


def test_a_stage_that_is_left_out_has_no_say() -> None:
    run = config()
    model, dice = Decoder(run.model), np.random.default_rng(1)
    windows = [(dice.integers(32, size=(2, 8)), dice.integers(32, size=(2, 8)))]
    blocks = stage_blocks(run.model.layers, 4)
    before, other = omissions(model, windows, blocks, [(2,), (1,)], bf16=False)
    for index in blocks[2]:
        for parameter in model.blocks[str(index)].parameters():
            parameter.data.fill_(3.0)
    after, changed = omissions(model, windows, blocks, [(2,), (1,)], bf16=False)
    assert after.loss == pytest.approx(before.loss)
    assert changed.loss != pytest.approx(other.loss)
