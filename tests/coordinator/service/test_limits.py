from __future__ import annotations

import pytest
from coordinator.cases import Clock
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.runs.registry import HEARTBEAT_SECONDS
from pier_coordinator.service import limits
from pier_coordinator.service.limits import RATES, Limits, Rate
from pier_coordinator.store.refusals import TooFast


def allowed(limits: Limits, caller: str = "a", method: str = "M") -> bool:
    try:
        limits.count(caller, method)
    except TooFast:
        return False
    return True


def test_a_burst_passes_and_then_so_many_a_second() -> None:
    clock = Clock(0.0)
    counted = Limits({"M": Rate(2, 5)}, clock)
    assert [allowed(counted) for _ in range(6)] == [True] * 5 + [False]
    with pytest.raises(TooFast, match=r"M: more than 2 calls a second; ask again in 0\.5 s") as caught:
        counted.count("a", "M")
    clock.now += caught.value.seconds
    assert [allowed(counted) for _ in range(2)] == [True, False]
    clock.now += 100
    assert [allowed(counted) for _ in range(6)] == [True] * 5 + [False]


def test_callers_and_methods_do_not_disturb_each_other() -> None:
    counted = Limits({"M": Rate(1, 1), "N": Rate(1, 1)}, Clock(0.0))
    assert allowed(counted)
    assert not allowed(counted)
    assert allowed(counted, caller="b")
    assert allowed(counted, method="N")


@given(steps=st.lists(st.floats(0, 3), max_size=60))
def test_never_more_than_the_burst_and_the_rate_pass(steps: list[float]) -> None:
    clock = Clock(0.0)
    counted = Limits({"M": Rate(2, 5)}, clock)
    passed = 0
    for step in steps:
        clock.now += step
        passed += allowed(counted)
    assert passed <= 5 + 2 * clock.now + 1e-6


def test_memory_is_bounded_and_the_busy_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUCKETS", 3)
    counted = Limits({"M": Rate(1, 1)}, Clock(0.0))
    for number in range(10):
        allowed(counted, caller="busy")
        allowed(counted, caller=str(number))
    assert len(counted) == 3
    assert not allowed(counted, caller="busy")


def test_a_well_behaved_site_stays_below() -> None:
    assert RATES["Heartbeat"].per_second >= 2 / HEARTBEAT_SECONDS
