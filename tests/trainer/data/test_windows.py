from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.trainer.data.corpus import Corpus
from pier_node.trainer.data.windows import Batch, Windows, share

CONTEXT = 8
CORPUS = Corpus(np.arange(5000, dtype=np.uint16), np.arange(10_000, 10_100, dtype=np.uint16), 20_000)

steps = st.integers(0, 2**40)


def windows(seed: int = 1, node: str = "a", corpus: Corpus = CORPUS) -> Windows:
    return Windows(corpus, CONTEXT, seed, node)


def equal(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


@given(steps, st.integers(1, 40))
def test_targets_are_inputs_one_token_later(step: int, sequences: int) -> None:
    inputs, targets = windows().batch(step, sequences)
    assert inputs.shape == targets.shape == (sequences, CONTEXT)
    assert inputs.dtype == targets.dtype == np.int64
    assert (targets == inputs + 1).all(), "the corpus counts up"
    assert (np.diff(inputs) == 1).all()


@given(steps, st.integers(1, 40), st.integers(1, 8))
def test_workers_rows_join_to_the_batch(step: int, sequences: int, workers: int) -> None:
    parts = [windows().rows(step, *share(sequences, worker, workers)) for worker in range(workers)]
    joined = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    assert equal(joined, windows().batch(step, sequences))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_are_all_and_nearly_equal(sequences: int, workers: int) -> None:
    shares = [share(sequences, worker, workers) for worker in range(workers)]
    ends = [first + count for first, count in shares]
    assert [first for first, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == sequences
    assert max(count for _, count in shares) - min(count for _, count in shares) <= 1


@given(steps, st.integers(1, 20))
def test_a_larger_batch_only_adds_rows(step: int, sequences: int) -> None:
    small, large = windows().batch(step, sequences), windows().batch(step, sequences + 5)
    assert equal(small, (large[0][:sequences], large[1][:sequences]))


def test_seed_node_and_step_each_decide() -> None:
    batch = windows().batch(3, 4)
    assert equal(batch, windows().batch(3, 4))
    assert not equal(batch, windows().batch(4, 4))
    assert not equal(batch, windows(seed=2).batch(3, 4))
    assert not equal(batch, windows(node="b").batch(3, 4))


def test_the_draw_never_changes() -> None:
    inputs, _ = windows().batch(7, 4)
    assert inputs[:, 0].tolist() == [4433, 149, 4185, 3191]


def test_starts_are_spread_over_all_of_the_part() -> None:
    corpus = Corpus(np.arange(CONTEXT + 10, dtype=np.uint8), CORPUS.validation, 256)
    first = np.concatenate([windows(corpus=corpus).batch(step, 50)[0][:, 0] for step in range(40)])
    counts = np.bincount(first, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 150
    assert counts.max() < 250


def test_validation_is_even_and_the_same_for_all() -> None:
    batches = windows().validation(3, 4)
    assert [batch[0].shape for batch in batches] == [(4, CONTEXT)] * 3
    starts = np.concatenate([inputs[:, 0] for inputs, _ in batches]) - 10_000
    assert starts.tolist() == [0, 8, 16, 24, 33, 41, 49, 57, 66, 74, 82, 91]
    assert all(equal(*pair) for pair in zip(batches, windows(9, "z").validation(3, 4), strict=True))
    assert all((targets == inputs + 1).all() for inputs, targets in batches)


@pytest.mark.parametrize("workers", [1, 2, 5, 13])
def test_validation_in_small_batches_and_by_several_workers_has_the_same_windows(workers: int) -> None:
    whole = [row for inputs, _ in windows().validation(3, 4) for row in inputs.tolist()]
    shares = [windows().validation(3, 4, 2, worker, workers) for worker in range(workers)]
    batches = [inputs for share in shares for inputs, _ in share]
    assert [row for batch in batches for row in batch.tolist()] == whole
    assert {len(batch) for batch in batches} <= {1, 2}


def test_a_corpus_of_one_window_is_enough() -> None:
    corpus = Corpus(np.arange(CONTEXT + 1, dtype=np.uint8), np.arange(CONTEXT + 1, dtype=np.uint8), 256)
    inputs, targets = windows(corpus=corpus).batch(5, 2)
    assert inputs.tolist() == [list(range(CONTEXT))] * 2
    assert targets.tolist() == [list(range(1, CONTEXT + 1))] * 2
    [(inputs, _)] = windows(corpus=corpus).validation(1, 1)
    assert inputs.tolist() == [list(range(CONTEXT))]


@pytest.mark.parametrize(
    ("train", "validation", "problem", "remedy"),
    [
        (CONTEXT, 100, r"this site's part .* has 8 tokens; one window of model\.context = 8 needs 9", "run.sites"),
        (0, 100, r"has 0 tokens", "Add text"),
        (100, CONTEXT, r"the validation part of the data has 8 tokens; .* needs 9", "data.validation"),
    ],
)
def test_too_little_text_says_what_to_do(train: int, validation: int, problem: str, remedy: str) -> None:
    with pytest.raises(PierError, match=problem) as caught:
        windows(corpus=Corpus(np.zeros(train, np.uint8), np.zeros(validation, np.uint8), 256))
    assert remedy in caught.value.remedy
