from __future__ import annotations

import numpy as np

from pier_node.engine.moments import Moments, SharedMoments


def test_torn_moments_are_recovered() -> None:
    saved: Moments = (np.full(3, 2.0, np.float32), np.full(3, 4.0, np.float32), 7)
    moments = SharedMoments(3, None, lambda: saved)
    moments.first.array[:2], moments.torn = 99.0, True
    moments.restore()
    assert moments.first.array.tolist() == [2.0, 2.0, 2.0]
    assert moments.second.array.tolist() == [4.0, 4.0, 4.0]
    assert (moments.step, moments.torn, moments.due()) == (7, False, 7)


def test_with_nothing_to_recover_from_they_begin_anew() -> None:
    moments = SharedMoments(3, None, lambda: None)
    moments.accept(5)
    moments.first.array[:], moments.second.array[:], moments.torn = 1.0, 1.0, True
    moments.restore()
    assert not moments.first.array.any()
    assert not moments.second.array.any()
    assert (moments.step, moments.torn) == (0, False)


def test_a_program_loads_moments_once_and_when_somebody_else_has_changed_them() -> None:
    moments = SharedMoments(3, None, lambda: None)
    assert moments.due() == 0
    moments.accept(5)
    assert moments.due() is None
    moments.accept(40, changed=True)
    assert (moments.due(), moments.due()) == (40, None)
