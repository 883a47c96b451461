from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.config.run import RunConfig
from pier_node.doctor.finding import Verdict
from pier_node.doctor.utilisation import AIM, exchange_bytes, share_of_compute, utilisation_finding

PARAMETERS = 30_800_000


def config(**outer: Any) -> RunConfig:
    """A step of 8 sequences of 128 tokens: 1024 tokens."""
    return RunConfig.model_validate({"inner": {"total_steps": 100_000}, "outer": outer})


def test_bytes_of_an_exchange() -> None:
    assert exchange_bytes(config(), 1000, 2) == 4000
    assert exchange_bytes(config(), 1000, 4) == 6000
    assert exchange_bytes(config(), 1000, 1) == 0
    assert exchange_bytes(config(codec="int4"), 1000, 2) == pytest.approx(4000 * 4.25 / 32)
    assert exchange_bytes(config(algorithm="noloco"), 1000, 4) == 4000, "to its partner only"


def test_with_overlap_only_what_outlasts_the_inner_steps_counts() -> None:
    assert share_of_compute(config(), 10.0, 5.0) == pytest.approx(2 / 3)
    assert share_of_compute(config(overlap=True), 10.0, 5.0) == 1.0
    assert share_of_compute(config(overlap=True), 10.0, 20.0) == 0.5
    finding = utilisation_finding(config(overlap=True), PARAMETERS, 2, 6.25e6, 5120, None)
    assert finding.values["better_inner_steps"] == 89
    assert finding.remedy.endswith('; or set outer.codec = "int4" (an eighth of the bytes).')


def test_a_fast_line() -> None:
    """2 sites: 123.2 MB at 125 MB/s take 0.986 s; 50 steps of 1024 tokens at 5120 a second take 10 s."""
    finding = utilisation_finding(config(), PARAMETERS, 2, 125e6, 5120, None)
    assert finding.verdict is Verdict.OK
    assert finding.values["exchange_seconds"] == pytest.approx(0.9856)
    assert finding.values["compute_seconds"] == pytest.approx(10.0)
    assert finding.values["utilisation"] == pytest.approx(10 / 10.9856)
    assert finding.detail == "91 % expected: H = 50 inner steps take 10 s, an exchange 986 ms"


def test_a_slow_line_is_met_by_more_inner_steps() -> None:
    """At 50 Mbit/s the exchange takes 19.7 s: 34 %. For 90 %: 9 · 19.7 s / 0.2 s = 887 steps."""
    finding = utilisation_finding(config(), PARAMETERS, 2, 6.25e6, 5120, 0.31)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.values["better_inner_steps"] == 890
    assert "Raise outer.inner_steps to H = 890" in finding.remedy
    assert finding.detail.endswith("; 31 % so far, waits for others included")


def test_in_between_it_is_advice() -> None:
    finding = utilisation_finding(config(), PARAMETERS, 2, 25e6, 5120, None)
    assert 0.5 < finding.values["utilisation"] < 0.8
    assert finding.verdict is Verdict.ADVICE


def test_no_advice_is_longer_than_the_run() -> None:
    short = RunConfig.model_validate({"inner": {"total_steps": 500}})
    finding = utilisation_finding(short, PARAMETERS, 2, 6.25e6, 5120, None)
    assert "500 inner steps are fewer than the H = 890" in finding.remedy
    assert "smaller model" in finding.remedy


def test_synchronous_training_exchanges_at_each_step() -> None:
    finding = utilisation_finding(config(algorithm="sync"), PARAMETERS, 2, 125e6, 5120, None)
    assert finding.values["compute_seconds"] == pytest.approx(0.2)
    assert 'algorithm = "pier"' in finding.remedy


def test_what_is_not_known_is_said() -> None:
    assert utilisation_finding(config(), PARAMETERS, 1, 0, 0, None).verdict is Verdict.OK
    no_link = utilisation_finding(config(), PARAMETERS, 2, 0, 5120, None)
    no_speed = utilisation_finding(config(), PARAMETERS, 2, 125e6, 0, None)
    assert no_link.verdict is no_speed.verdict is Verdict.UNKNOWN
    assert "an exchange takes 986 ms" in no_speed.detail


@given(
    rate=st.floats(1e4, 1e9),
    speed=st.floats(10, 1e7),
    steps=st.integers(1, 1000),
    sites=st.integers(2, 64),
)
def test_the_advice_is_worth_following(rate: float, speed: float, steps: int, sites: int) -> None:
    """With the H that is advised the prediction reaches the aim, and not at twice the steps that it takes."""
    finding = utilisation_finding(config(inner_steps=steps), PARAMETERS, sites, rate, speed, None)
    wanted = int(finding.values.get("better_inner_steps", 0))
    if 0 < wanted <= 100_000:
        better = utilisation_finding(config(inner_steps=wanted), PARAMETERS, sites, rate, speed, None)
        assert AIM - 1e-9 <= better.values["utilisation"] <= 0.95
        assert wanted > steps
