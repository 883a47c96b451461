"""Whatever sites run in, the driver does to them what it says."""

from __future__ import annotations

import json

import pytest
from multisite.harm import asleep, slowed
from multisite.world import RATES, MakeWorld
from processes.run import ENDLESS
from processes.site import wait_until

pytestmark = pytest.mark.multisite


@pytest.mark.parametrize("places", ["docker", "namespaces"], indirect=True)
def test_sites_meet_are_cut_off_and_come_back(world: MakeWorld) -> None:
    run = world(RATES, coordinator=True, inner=ENDLESS)
    run.start()
    run.reach(2)
    assert len(run["a"].status()["peers"]) == 2
    assert json.loads(run.say("c", "status", "--json"))["name"] == "c"
    assert {row["name"] for row in run.coordinator.get("/api/nodes")["sites"]} == set(RATES)
    assert run.sent("b") > run["b"].events()[-1]["bytes_sent"] > 0

    run.cut("b")
    at = max(run["a"].round, run["c"].round)
    run.reach(at + 3, "a", "c")
    behind = run["b"].round
    assert behind <= at + 1
    run.heal()
    run["b"].reach(behind + 3)

    # Of a round of two, the one whose partner dies would rightly wait for it.
    wait_until("all are together", lambda: len(run["a"].events()[-1]["members"]) == len(RATES))
    run["c"].kill()
    run["a"].reach(run["a"].round + 2)
    run["c"].start()
    run["c"].rejoin()
    assert run["b"].stop() == 0


@pytest.mark.parametrize("places", ["docker", "namespaces"], indirect=True)
def test_links_and_machines_change_their_pace(world: MakeWorld) -> None:
    run = world(RATES, inner=ENDLESS)
    run.start()
    run.reach(2)
    run.reshape(b=1)
    with asleep(run["c"]):
        at = run["c"].round
        run.reach(max(run["a"].round, run["b"].round) + 2, "a", "b")
        assert run["c"].round == at
    run["c"].rejoin()
    with slowed(run["a"], 0.5):
        run["a"].reach(run["a"].round + 1)
    wait_until("all are together", lambda: len({run[name].status().get("digest") for name in RATES}) == 1)
