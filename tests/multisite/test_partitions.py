"""A network that falls apart: who goes on, and what becomes of all when it is whole again."""

from __future__ import annotations

import pytest
from multisite.world import MakeWorld
from processes.run import ENDLESS
from processes.site import wait_until

pytestmark = pytest.mark.multisite

FIVE = dict.fromkeys("abcde", 100.0)
FEW, MOST = "ab", "cde"


@pytest.mark.parametrize(("sites", "few"), [pytest.param("abc", "a", marks=pytest.mark.smoke), ("abcde", "ab")])
def test_only_a_majority_goes_on_and_the_others_catch_up(world: MakeWorld, sites: str, few: str) -> None:
    run = world(dict.fromkeys(sites, 100.0), inner=ENDLESS)
    most = [name for name in sites if name not in few]
    run.start()
    run.reach(3)
    run.cut(*few)
    run.reach(max(site.round for site in run.sites.values()) + 3, *most)
    behind = {name: run[name].round for name in few}
    run.reach(run["c"].round + 2, *most)
    assert {name: run[name].round for name in few} == behind
    wait_until(
        "they say what they lack",
        lambda: all("no majority of the last round's members is here" in run[name].output for name in few),
    )
    run.heal()
    for name in few:
        run[name].rejoin()


def test_both_parts_of_a_run_of_pairs_go_on_and_meet_again(world: MakeWorld) -> None:
    run = world(FIVE, inner=ENDLESS, outer={"algorithm": "noloco"})
    run.start()
    run.reach(3)
    run.cut(*FEW)
    for names in (FEW, MOST):
        run.reach(max(run[name].round for name in names) + 4, *names)
    apart = {name: len(run[name].events()) for name in FIVE}
    run.heal()

    def met(name: str, part: str) -> bool:
        nodes = {run[other].node for other in FIVE if other not in part}
        return any(nodes & set(event["members"]) for event in run[name].events()[apart[name] :])

    wait_until("they meet the others", lambda: all(met(name, FEW) for name in FEW), within=180)
