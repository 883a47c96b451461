from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pier_node.doctor.finding import Verdict
from pier_node.doctor.machine import FAR, SETTING, forgets_idle_lines, idle_finding


@pytest.mark.parametrize(("forgets", "round_trip"), [(False, 0.2), (True, 0.9 * FAR), (True, 0.0)])
def test_nothing_is_said_when_it_does_not_matter(forgets: bool, round_trip: float) -> None:
    assert idle_finding(forgets, round_trip) == []


def test_what_to_set_is_said() -> None:
    [finding] = idle_finding(True, 0.08)
    assert finding.verdict is Verdict.ADVICE
    assert "80 ms" in finding.detail
    assert finding.remedy == "As root: sysctl -w net.ipv4.tcp_slow_start_after_idle=0"


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4").exists(), reason="no Linux network settings here: NOT tested")
def test_the_setting_is_the_kernels() -> None:
    said = subprocess.run(["sysctl", "-n", SETTING], capture_output=True, text=True, check=True).stdout
    assert forgets_idle_lines() is (said.strip() == "1")
