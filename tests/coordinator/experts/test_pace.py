from __future__ import annotations

import pytest

from pier_coordinator.experts.expert_sites import Paces

FLOPS = 1e6


def test_a_speed_is_that_of_the_last_stretch() -> None:
    paces = Paces()
    paces.heard("a", 0, 10, 30.0, FLOPS)
    assert paces.speed("a") is None, "the seconds before the first step are those of starting"
    paces.heard("a", 0, 20, 45.0, FLOPS)
    assert paces.speed("a") is None, "ten steps are too few"
    paces.heard("a", 0, 30, 50.0, FLOPS)
    assert paces.speed("a") == pytest.approx(FLOPS)
    paces.heard("a", 0, 70, 55.0, FLOPS)
    assert paces.speed("a") == pytest.approx(FLOPS), "five seconds are too short"
    paces.heard("a", 0, 110, 60.0, FLOPS)
    assert paces.speed("a") == pytest.approx(8 * FLOPS)
    assert paces.speed("b") is None


@pytest.mark.parametrize(("job", "step", "seconds"), [(1, 60, 60.0), (0, 20, 60.0), (0, 60, 20.0)])
def test_another_expert_or_another_start_begins_a_new_stretch(job: int, step: int, seconds: float) -> None:
    paces = Paces()
    paces.heard("a", 0, 30, 30.0, FLOPS)
    paces.heard("a", job, step, seconds, FLOPS)
    assert paces.speed("a") is None
    paces.heard("a", job, step + 20, seconds + 10.0, FLOPS)
    assert paces.speed("a") == pytest.approx(2 * FLOPS)
