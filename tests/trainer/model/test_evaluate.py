from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from pipeline.cases import config
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.pipeline.stage import stage_blocks
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.evaluate import (
    MOST,
    Tokens,
    bits_per_byte,
    choices,
    early_exits,
    omissions,
    validation_loss,
)


def windows(*sequences: int) -> list[tuple[Tokens, Tokens]]:
    random = np.random.default_rng(1)
    return [(random.integers(0, 61, (rows, 24)), random.integers(0, 61, (rows, 24))) for rows in sequences]


def mean_loss(logits: Tensor, targets: Tokens) -> float:
    chances = logits.double().log_softmax(-1)
    return -chances.gather(-1, torch.from_numpy(targets)[..., None]).mean().item()


def test_a_model_that_knows_nothing_loses_ln_vocab(config: ModelSection) -> None:
    model = Decoder(config)
    Layout.of(config).load(model, torch.zeros(Layout.of(config).length))
    assert validation_loss(model, windows(2, 1)) == pytest.approx(math.log(61), rel=1e-6)


def test_every_token_counts_the_same_whatever_its_batch(model: Decoder) -> None:
    uneven = windows(1, 3)
    one, three = (mean_loss(model(torch.from_numpy(inputs)), targets) for inputs, targets in uneven)
    assert validation_loss(model, uneven) == pytest.approx((one + 3 * three) / 4, rel=1e-5)


def test_under_bfloat16_the_logits_are_rounded_and_their_loss_is_not(model: Decoder) -> None:
    batches = windows(2)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.from_numpy(batches[0][0]))
    assert logits.dtype == torch.bfloat16
    expected = mean_loss(logits, batches[0][1])
    assert validation_loss(model, batches, bf16=True) == pytest.approx(expected, rel=1e-5)
    assert validation_loss(model, batches) == pytest.approx(expected, rel=0.02)


def test_it_leaves_weights_and_gradients_alone(model: Decoder, weights: Tensor) -> None:
    validation_loss(model, windows(1))
    flat = torch.empty_like(weights)
    Layout.of(model.config).store(dict(model.named_parameters()), flat)
    assert torch.equal(flat, weights)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(256)) == pytest.approx(8.0)
    assert bits_per_byte(1.0) == pytest.approx(1.4426950408889634)
    assert bits_per_byte(3.0, bytes_per_token=4.5) == pytest.approx(0.9617966939259756)


def test_any_stage_but_the_first_is_left_out() -> None:
    assert choices(4, 1) == [(1,), (2,), (3,)]
    assert choices(4, 2) == [(1, 2), (1, 3), (2, 3)]
    assert choices(4, 0) == [()]
    assert early_exits(4) == [(3,), (2, 3), (1, 2, 3)]
    assert 1 < len(choices(20, 10)) <= MOST


def test_choices_are_spread_over_all_however_many_there_are() -> None:
    every = [*itertools.combinations(range(1, 12), 5)]
    assert choices(12, 5) == every[:: -(-len(every) // MOST)]
    assert 1 < len(choices(64, 32)) <= MOST


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
