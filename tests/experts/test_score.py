from __future__ import annotations

import numpy as np
import pytest
import torch

from pier_node.config.run import ModelSection
from pier_node.experts.domains import rows_of
from pier_node.experts.scoring import BATCH, log_probs, spread
from pier_node.trainer.model.decoder import Decoder

CONFIG = ModelSection(preset="llama-tiny", context=16)
TEXT = bytes(np.random.default_rng(1).integers(0, 256, 16 * 70 + 9).astype(np.uint8))


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(3)
    return Decoder(CONFIG)


@torch.no_grad()
def test_every_byte_gets_what_the_whole_distribution_gives_it(model: Decoder) -> None:
    rows = rows_of(TEXT, 16)
    found = log_probs(model, rows)
    assert found.dtype == np.float32
    assert found.shape == (70, 16)
    for row in (0, BATCH - 1, BATCH, 69):  # batches do not mix rows up
        whole = torch.log_softmax(model(torch.from_numpy(rows[row : row + 1, :-1].astype(np.int64)))[0], dim=-1)
        assert whole.exp().sum(dim=-1).numpy() == pytest.approx(np.ones(16), abs=1e-5)  # property 3
        np.testing.assert_allclose(found[row], whole.numpy()[np.arange(16), rows[row, 1:]], atol=1e-5)


def test_a_row_knows_nothing_of_the_one_before(model: Decoder) -> None:
    rows = rows_of(TEXT, 16)
    np.testing.assert_allclose(log_probs(model, rows[5:7]), log_probs(model, rows)[5:7], atol=1e-6)


def test_every_batch_is_told(model: Decoder) -> None:
    told: list[int] = []
    log_probs(model, rows_of(TEXT, 16), told.append)
    assert told == [BATCH, BATCH, 70 - 2 * BATCH]


def test_fewer_rows_are_from_all_over_the_text() -> None:
    rows = rows_of(TEXT, 16)
    assert spread(rows, 7).tolist() == rows[::10].tolist()
    assert spread(rows, 0) is rows
    assert spread(rows, 70) is rows
    assert len(spread(rows, 69)) == 69
