"""Sites that are killed at the worst moments, one or all: the others go on, and they come back."""

from __future__ import annotations

import pytest
from multisite.world import RATES, MakeWorld
from processes.run import ENDLESS
from processes.site import wait_until

pytestmark = pytest.mark.multisite

KILLED = (-9, 137)
"""Exit codes of SIGKILL: of a process, of a container."""


def test_a_site_that_is_killed_in_mid_exchange_and_again_as_it_catches_up_comes_back(world: MakeWorld) -> None:
    run = world(RATES, coordinator=True, inner=ENDLESS)
    victim = run["b"]
    run.start("a", "c")
    victim.start("--fail-at", "3:exchanging")
    assert victim.ended() in KILLED
    run.others_go_on(victim)
    victim.start("--fail-at", "1:fetching")
    assert victim.ended() in KILLED
    run.others_go_on(victim)
    wait_until("the operator hears of it", lambda: run.told("b is silent"))
    victim.start()
    victim.rejoin()
    wait_until("the operator hears of it", lambda: run.told("b is back"))


@pytest.mark.smoke
def test_a_leader_that_is_killed_in_mid_vote_forks_nobody(world: MakeWorld) -> None:
    run = world(RATES, inner=ENDLESS)
    leader, *others = sorted(run.sites.values(), key=lambda site: site.node)
    for site in others:
        site.start()
    leader.start("--fail-at", "3:voting")
    assert leader.ended() in KILLED
    run.others_go_on(leader)
    leader.start()
    leader.rejoin()


def test_all_are_killed_at_once_and_go_on_where_they_were(world: MakeWorld) -> None:
    run = world(RATES, coordinator=True, inner=ENDLESS)
    run.start()
    run.reach(4)
    for site in run.sites.values():
        site.kill()
    at = max(site.round for site in run.sites.values())
    run.start()
    run.reach(at + 2)
    assert all("Resuming at round" in site.output for site in run.sites.values())
