"""Faults strike where they were asked to, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pier_node.base.faults import NO_FAULTS, PAIR_PHASES, PHASES, Faults, kill_at

VICTIM = """
import asyncio, sys
from pier_node.base.faults import kill_at
async def main():
    faults = kill_at(sys.argv[1])
    for round in (1, 2):
        for phase in ("ready", "staged"):
            print(round, phase, flush=True)
            await faults.reach(round, phase)
asyncio.run(main())
"""


async def test_without_faults_nothing_happens() -> None:
    for phase in PHASES + PAIR_PHASES:
        await NO_FAULTS.reach(1, phase)


async def test_a_strike_learns_where_it_is() -> None:
    struck: list[tuple[int, str]] = []

    async def strike(round: int, phase: str) -> None:
        struck.append((round, phase))

    await Faults(strike).reach(3, "voting")
    assert struck == [(3, "voting")]


def test_kill_at_is_a_power_cut_at_that_point() -> None:
    done = subprocess.run([sys.executable, "-c", VICTIM, "2:ready"], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert done.stdout.splitlines() == ["1 ready", "1 staged", "2 ready"]


@pytest.mark.parametrize("point", ["", "3", "3:", "x:ready", "3:lunch", "-1:ready"])
def test_a_point_that_does_not_exist_is_refused(point: str) -> None:
    with pytest.raises(ValueError, match="is not ROUND:PHASE"):
        kill_at(point)
