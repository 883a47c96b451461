from __future__ import annotations

import asyncio
import time

import pytest

from pier_node.outer.times import Times


def test_time_goes_where_it_was_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    times = Times()
    with times.spent_waiting():
        pass
    with pytest.raises(OSError, match="lost"), times.spent_on_attempt():
        raise OSError("lost")
    with times.spent_on_attempt():
        pass
    assert times == Times(waiting=1.0, exchange=4.0, retry=2.0)


def test_an_attempt_that_others_have_decided_is_no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    times = Times()
    with pytest.raises(asyncio.CancelledError), times.spent_on_attempt():
        raise asyncio.CancelledError
    assert times == Times(exchange=2.0)


def test_what_is_hidden_behind_inner_steps_is_not_seen() -> None:
    times = Times(waiting=1.0, exchange=2.0, retry=1.0)
    assert times.scaled_to(2.0) == Times(0.5, 1.0, 0.5)
    assert times.scaled_to(0.0) == Times()
    assert Times().scaled_to(3.0) == Times()
