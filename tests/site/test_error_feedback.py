from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import fp32, outer_state, shared

from pier_node.outer.schedule import span
from pier_node.rounds.state_store import Checkpoint, StateStore
from pier_node.site.error_feedback import UnsentUpdate

LENGTH = 7


def constant(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.full(LENGTH, value, np.float32)


def test_nothing_at_first() -> None:
    unsent = UnsentUpdate(LENGTH, 1, lossy=False)
    assert not unsent
    assert unsent.start(constant(5)) is None


def test_what_is_learned_adds_up_and_training_goes_on_from_it() -> None:
    unsent = UnsentUpdate(LENGTH, 1, lossy=False)
    unsent.learn(constant(5), constant(3), 40)
    unsent.learn(constant(3), constant(2), 20)
    assert (unsent.delta.array.tolist(), unsent.tokens) == ([3.0] * LENGTH, [60])
    start = unsent.start(constant(10))
    assert start is not None
    assert start.array.tolist() == [7.0] * LENGTH
    unsent.taken(0)
    assert not unsent


def test_a_fragment_is_taken_by_itself() -> None:
    unsent = UnsentUpdate(LENGTH, 3, lossy=False)
    unsent.learn(constant(1), constant(0), 10)
    unsent.taken(1)
    unsent.learn(constant(1), constant(0), 10)
    assert unsent.tokens == [20, 10, 20]
    assert [float(unsent.delta.array[span(LENGTH, 3, index)][0]) for index in range(3)] == [2.0, 1.0, 2.0]
    update = unsent.offer(span(LENGTH, 3, 1), unsent.tokens[1])
    assert (update.sent().tolist(), update.tokens, update.error) == ([1.0, 1.0], 10, None)


def test_what_a_codec_lost_is_offered_again_once_the_rest_was_taken() -> None:
    unsent = UnsentUpdate(LENGTH, 2, lossy=True)
    unsent.learn(constant(4), constant(0), 10)
    part = span(LENGTH, 2, 1)
    update = unsent.offer(part, 10)
    assert update.error is not None
    update.error[:] = update.sent() - 3
    again = unsent.offer(part, 10)
    assert again.sent().tolist() == [4.0] * 4, "an attempt that failed has changed nothing"
    assert again.error is not None
    again.error[:] = 1.5
    unsent.taken(1)
    unsent.taken(0)
    assert unsent.residual is not None
    assert unsent.residual.array.tolist() == [0.0] * 3 + [1.5] * 4
    unsent.learn(constant(2), constant(0), 10)
    assert unsent.offer(part, 10).sent().tolist() == [3.5] * 4
    assert unsent.offer(slice(0, LENGTH), 10, constant(1)).sent().tolist() == [1.0] * 3 + [2.5] * 4


def test_a_restored_one_is_as_it_was() -> None:
    unsent = UnsentUpdate(3, 2, lossy=True)
    unsent.restore(shared([1, 2, 3]), (5, 6), shared([7, 8, 9]))
    assert unsent.tokens == [5, 6]
    assert unsent.offer(slice(0, 3), 5).sent().tolist() == [8.0, 10.0, 12.0]
    plain = UnsentUpdate(3, 1, lossy=False)
    plain.restore(None, (), shared([7, 8, 9]))
    assert (bool(plain), plain.residual) == (False, None)


def test_a_residual_that_was_sent_before_a_restart_is_not_sent_again() -> None:
    """What the codec lost then is not known any more; the other fragment's residual was not sent yet."""
    unsent = UnsentUpdate(LENGTH, 2, lossy=True)
    unsent.restore(shared([4] * LENGTH), (5, 5), shared([1] * LENGTH))
    unsent.taken(1)
    assert unsent.offer(slice(0, LENGTH), 5).sent().tolist() == [5.0] * 3 + [0.0] * 4


def test_forgetting() -> None:
    unsent = UnsentUpdate(2, 1, lossy=True)
    unsent.restore(shared([1, np.nan]), (5,), shared([np.inf, 0]))
    unsent.forget()
    assert not unsent
    assert unsent.offer(slice(0, 2), 5).sent().tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=20))
def test_anchor_and_pending_hold_all_that_was_learned(rounds: list[tuple[int, int]]) -> None:
    """With rounds that take the fragments in any order the site's weights are what plain training makes of them."""
    unsent, anchor, weights = UnsentUpdate(LENGTH, 4, lossy=False), constant(0), 0
    for fragment, step in rounds:
        start = unsent.start(anchor)
        now = anchor if start is None else start.array
        assert now.tolist() == [float(weights)] * LENGTH
        unsent.learn(now, now - np.float32(step), step)
        weights -= step
        part = span(LENGTH, 4, fragment)
        anchor[part] -= unsent.offer(part, 1).sent()
        unsent.taken(fragment)
    assert fp32(*(anchor - unsent.delta.array)).tolist() == [float(weights)] * LENGTH


def test_old_errors_fade() -> None:
    unsent = UnsentUpdate(2, 1, lossy=True, decay=0.5)
    unsent.restore(shared([1, 1]), (5,), shared([8, 4]))
    update = unsent.offer(slice(0, 2), 5)
    assert update.sent().tolist() == [5.0, 3.0]
    assert update.norm == np.float32(np.sqrt(34))
    assert unsent.offer(slice(0, 2), 5).sent().tolist() == [5.0, 3.0], "once, however often it is offered"


CCLOCO = (
    ((4, 1, 2, -3, 0, 0.5, -0.25, 8), (0, 1, 2, -3, 0, 0.5, -0.25, 0)),
    ((0, 1, 2, 0, 1, 1, 1, -4), (0, 1.5, 0, -1.5, 1, 1.25, 0.875, 0)),
    ((1, 1, 1, 1, -1, -1, -1, -1), (1, 0, 1, 0.25, -0.5, -0.375, -0.5625, 0)),
)
"""Gradients, and the error buffer of `CCLoco.step` after them, of github.com/tplr-y/CCLoco at 5bfce52, which sends two
of eight values, with error_decay 0.5 and lr 1."""


def test_what_is_kept_back_is_what_ccloco_keeps_back() -> None:
    unsent = UnsentUpdate(8, 1, lossy=True, decay=0.5)
    for gradient, kept_back in CCLOCO:
        unsent.learn(fp32(*gradient), np.zeros(8, np.float32), 1)
        update = unsent.offer(slice(0, 8), 1)
        assert update.error is not None
        lost = update.sent().copy()
        lost[np.argsort(np.abs(lost))[-2:]] = 0.0
        update.error[:] = lost
        unsent.taken(0)
        assert unsent.residual is not None
        assert unsent.residual.array.tolist() == [float(value) for value in kept_back]


def test_a_residual_in_bf16_is_offered_as_it_was_rounded_also_after_a_restart(tmp_path: Path) -> None:
    unsent = UnsentUpdate(LENGTH, 2, lossy=True, rounded=True)
    unsent.learn(constant(4), constant(0), 10)
    part = span(LENGTH, 2, 1)
    update = unsent.offer(part, 10)
    assert update.error is not None
    update.error[:] = fp32(1 + 2**-8, 2, 3, 0.1)
    unsent.taken(1)
    unsent.learn(constant(1), constant(0), 10)
    expected = [1.0 + 1, 2 + 1, 3 + 1, 0.10009765625 + 1]
    assert unsent.offer(part, 10).sent().tolist() == expected
    assert unsent.residual is not None
    assert len(unsent.residual.array) == (LENGTH + 1) // 2, "half the memory"

    store = StateStore(tmp_path, bytes(32))
    store.save(Checkpoint(outer_state(["a"]), pending=unsent.delta, pending_tokens=(20, 10), residual=unsent.residual))
    saved, again = store.newest(), UnsentUpdate(LENGTH, 2, lossy=True, rounded=True)
    assert saved
    again.restore(saved.pending, saved.pending_tokens, saved.residual)
    for it in (slice(0, LENGTH), part):
        assert again.offer(it, 10).sent().tobytes() == unsent.offer(it, 10).sent().tobytes()
    again.forget()
    assert not again.offer(slice(0, LENGTH), 10).sent().any()


def test_a_residual_in_bf16_that_was_sent_before_a_restart_is_dropped() -> None:
    unsent = UnsentUpdate(LENGTH, 2, lossy=True, rounded=True)
    unsent.offer(slice(0, LENGTH), 5).error[:] = 1.0  # type: ignore[index]
    unsent.taken(0)
    unsent.taken(1)
    assert unsent.offer(slice(0, LENGTH), 5).sent().tolist() == [1.0] * 3 + [0.0] * 4
