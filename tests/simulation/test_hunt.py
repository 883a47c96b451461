"""Whatever happens to sites, in any order: replicas never fork, no step of a survivor is lost, and all get to the end.

`python -m simulation.hunt`, in this folder's parent, plays any number of schedules, plays one again and says all that
happens, or cuts it down.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulation.doubles import HuntWorkers
from simulation.faults import Fault, Schedule, settings, storms
from simulation.network import Weather
from simulation.playing import played
from simulation.process import this_process

TESTS = Path(__file__).parents[1]


def schedule(sites: int, *faults: Fault, **outer: Any) -> Schedule:
    """Of sites that train evenly, in good weather, on disks that take no time."""
    names = ("a1", "b2", "c3")[:sites]
    return Schedule(
        seed=1,
        names=names,
        config=settings(sites, 40, algorithm="diloco", adaptive_steps=False, **outer),
        weather=Weather(),
        faults=faults,
        calm=300.0,
        paces=dict.fromkeys(names, 1.0),
    )


FETCHED = schedule(
    2,
    Fault(0.0, "crash at phase", "a1", how="voting", number=5),
    Fault(4.0, "crash", "b2", span=200.0, since=5),
    Fault(0.0, "crash at phase", "a1", span=1.0, how="journaled", number=6),
)
"""a1 dies after its vote for round 5 has left, and fetches what b2 has made of it; b2 dies; a1 goes on alone, dies once
it has voted for round 6, and starts again."""

GIVEN_TO_ONE = schedule(
    2,
    Fault(1.5, "stop", "a1", span=8.0, since=2),
    Fault(9.0, "crash", "b2", span=100.0, since=2),
    overlap=True,
)
"""a1 stops, and gives its vote to b2, which goes on, and dies before a1 is back."""

GIVEN_TO_ONE_OF_TWO = schedule(
    3,
    Fault(0.5, "partition", "c3", span=9.5, since=3),
    Fault(1.0, "stop", "a1", span=4.0, since=3),
    Fault(10.0, "partition", "b2", span=100.0, since=3),
    overlap=True,
)
"""c3 is cut off; a1 stops, and gives its vote to b2; a1 is back, with c3, and b2 is cut off."""


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(FETCHED, id="a fetched state is not on the disk when its successor is voted for"),
        pytest.param(GIVEN_TO_ONE, id="a vote that was given away comes back"),
        pytest.param(GIVEN_TO_ONE_OF_TWO, id="a vote that was given away comes back while others are cut off"),
    ],
)
def test_forks_that_were(story: Schedule) -> None:
    assert not played(story).failures


def test_a_world_that_is_over_leaves_nothing_open() -> None:
    counts = []
    for _ in range(4):
        assert not played(GIVEN_TO_ONE).failures
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[1] + 2, "the first one imports, and the last world is still there"


SLOW = 15.0
"""Seconds that the workers of a site take to start when it comes back."""

WHEN = "c3: starts, for the 2. time", "c3: Resuming at round 3", "c3: INFO training: caught up with round"


def test_a_site_that_comes_back_fetches_the_state_while_its_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: HuntWorkers) -> None:
        await asyncio.sleep(SLOW if this_process().number > 1 else self.pace)

    monkeypatch.setattr(HuntWorkers, "start", start)
    told: list[str] = []
    played(schedule(3, Fault(1.0, "crash", "c3", span=10.0, since=3)), told.append)
    times = [float(next(line for line in told if what in line).split()[0]) for what in WHEN]
    assert times[0] < times[1] < times[2] < times[0] + SLOW / 2


HUNTED = 5
"""Schedules that a test draws and plays."""


@pytest.mark.sample(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, storms(200), HUNTED))
def test_hunt(first: int) -> None:
    """In a process of its own, which draws and plays as the command does."""
    command = [sys.executable, "-m", "simulation.hunt", "--seeds", f"{first}-{first + HUNTED}"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
