from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rounds.cases import fp32, shared

from pier_node.outer.schedule import span
from pier_node.site.unsent import Pending

LENGTH = 7


def constant(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.full(LENGTH, value, np.float32)


def test_nothing_at_first() -> None:
    pending = Pending(LENGTH, 1, lossy=False)
    assert not pending
    assert pending.start(constant(5)) is None


def test_what_is_learnt_adds_up_and_training_goes_on_from_it() -> None:
    pending = Pending(LENGTH, 1, lossy=False)
    pending.learn(constant(5), constant(3), 40)
    pending.learn(constant(3), constant(2), 20)
    assert (pending.delta.array.tolist(), pending.tokens) == ([3.0] * LENGTH, [60])
    start = pending.start(constant(10))
    assert start is not None
    assert start.array.tolist() == [7.0] * LENGTH
    pending.taken(0)
    assert not pending


def test_a_fragment_is_taken_by_itself() -> None:
    pending = Pending(LENGTH, 3, lossy=False)
    pending.learn(constant(1), constant(0), 10)
    pending.taken(1)
    pending.learn(constant(1), constant(0), 10)
    assert pending.tokens == [20, 10, 20]
    assert [float(pending.delta.array[span(LENGTH, 3, index)][0]) for index in range(3)] == [2.0, 1.0, 2.0]
    vector, error = pending.offer(span(LENGTH, 3, 1))
    assert (vector.tolist(), error) == ([1.0, 1.0], None)


def test_what_a_codec_lost_is_offered_again_once_the_rest_was_taken() -> None:
    pending = Pending(LENGTH, 2, lossy=True)
    pending.learn(constant(4), constant(0), 10)
    part = span(LENGTH, 2, 1)
    vector, error = pending.offer(part)
    assert error is not None
    error[:] = vector - 3
    again, error = pending.offer(part)
    assert again.tolist() == [4.0] * 4, "an attempt that failed has changed nothing"
    assert error is not None
    error[:] = 1.5
    pending.taken(1)
    pending.taken(0)
    assert pending.residual is not None
    assert pending.residual.array.tolist() == [0.0] * 3 + [1.5] * 4
    pending.learn(constant(2), constant(0), 10)
    assert pending.offer(part)[0].tolist() == [3.5] * 4
    assert pending.offer(slice(0, LENGTH), constant(1))[0].tolist() == [1.0] * 3 + [2.5] * 4


def test_a_restored_one_is_as_it_was() -> None:
    pending = Pending(3, 2, lossy=True)
    pending.restore(shared([1, 2, 3]), (5, 6), shared([7, 8, 9]))
    assert pending.tokens == [5, 6]
    assert pending.offer(slice(0, 3))[0].tolist() == [8.0, 10.0, 12.0]
    plain = Pending(3, 1, lossy=False)
    plain.restore(None, (), shared([7, 8, 9]))
    assert (bool(plain), plain.residual) == (False, None)


def test_forgetting() -> None:
    pending = Pending(2, 1, lossy=True)
    pending.restore(shared([1, np.nan]), (5,), shared([np.inf, 0]))
    pending.forget()
    assert not pending
    assert pending.offer(slice(0, 2))[0].tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=20))
def test_anchor_and_pending_hold_all_that_was_learnt(rounds: list[tuple[int, int]]) -> None:
    """With rounds that take the fragments in any order the site's weights are what plain training makes of them."""
    pending, anchor, weights = Pending(LENGTH, 4, lossy=False), constant(0), 0
    for fragment, step in rounds:
        start = pending.start(anchor)
        now = anchor if start is None else start.array
        assert now.tolist() == [float(weights)] * LENGTH
        pending.learn(now, now - np.float32(step), step)
        weights -= step
        part = span(LENGTH, 4, fragment)
        anchor[part] -= pending.offer(part)[0]
        pending.taken(fragment)
    assert fp32(*(anchor - pending.delta.array)).tolist() == [float(weights)] * LENGTH
