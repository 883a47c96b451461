"""Sites that come and go while the others train; and a coordinator that does."""

from __future__ import annotations

from signal import SIGKILL

import pytest
from multisite.world import MakeWorld
from processes.run import ENDLESS
from processes.site import wait_until

pytestmark = pytest.mark.multisite


def test_a_site_joins_at_round_ten_over_a_slow_line_and_leaves_politely(world: MakeWorld) -> None:
    run = world({"a": 50.0, "b": 50.0, "slow": 4.0}, coordinator=True, run={"sites": 2}, inner=ENDLESS)
    run.start("a", "b")
    run.reach(10, "a", "b")
    before = run["a"].round
    run["slow"].start()
    run["slow"].rejoin()
    first = next(event["round"] for event in run["slow"].events() if len(event["members"]) > 1)
    assert first > before + 1, "the others went on while it fetched"
    assert run["slow"].stop() == 0
    run.reach(run["a"].round + 3, "a", "b")
    wait_until("the operator hears of it", lambda: run.told("slow has left"))


def test_nobody_needs_the_coordinator(world: MakeWorld) -> None:
    run = world({"a": 50.0, "b": 50.0}, coordinator=True, inner=ENDLESS)
    run.start()
    run.reach(2)
    run.coordinator.end(SIGKILL)
    run.reach(run["a"].round + 3)
    run.coordinator.start()
    at = max(site.round for site in run.sites.values())
    wait_until(
        "all is told", lambda: all(max(run.coordinator.rounds(site), default=0) >= at for site in run.sites.values())
    )
