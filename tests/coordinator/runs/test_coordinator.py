from __future__ import annotations

import asyncio
import itertools
import sqlite3
from pathlib import Path

import pytest
from coordinator.cases import ALICE, BOB, CAROL, CONFIG, NOW, PATIENCE, Clock, Ticket, open_store, registration, running

from pier_coordinator.runs.coordinator import TIDY_SECONDS, Coordinator
from pier_coordinator.runs.sites import LEASE_SECONDS
from pier_coordinator.store.sites import Refused, enrol, register, trusted
from pier_coordinator.store.writer import Transaction
from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, RunSection
from pier_proto.v1.coordinator_pb2 import Paths
from pier_proto.v1.peer_pb2 import Place

FULL = "CREATE TRIGGER full BEFORE INSERT ON facts BEGIN SELECT RAISE(ABORT, 'full'); END"
"""The database takes no facts any more."""


async def test_the_first_fact_says_what_the_run_is(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        (first,) = run.coordinator.store.facts()
    assert (first.number, first.kind) == (1, "run")
    assert first.body == {
        "name": "lark",
        "run_hash": CONFIG.hash().hex(),
        "algorithm": "pier",
        "rounds": 20,
        "total_steps": 1000,
        "sites": 2,
        "codec": "none",
        "inner_steps": 50,
        "stages": 1,
        "parameters": 1_037_696,
    }


async def test_a_run_goes_on_with_its_own_configuration_only(tmp_path: Path) -> None:
    async with running(tmp_path):
        pass
    async with running(tmp_path) as run:
        assert len(list(run.coordinator.store.facts())) == 1
    store = open_store(tmp_path)
    with pytest.raises(PierError, match=r"run\.toml has changed since the run began"):
        await Coordinator(store, RunConfig(run=RunSection(name="other"))).begin()
    await store.close()


async def test_a_run_that_could_not_begin_begins_at_the_next_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.do(Transaction.execute, FULL)
    with pytest.raises(sqlite3.Error, match="full"):
        await Coordinator(store, CONFIG).begin()
    await store.do(Transaction.execute, "DROP TRIGGER full")
    await Coordinator(store, CONFIG).begin()
    assert [fact.kind for fact in store.facts()] == ["run"]
    await store.close()


async def test_after_a_restart_a_site_goes_on_with_its_lease(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        async with run.site(ALICE) as alice:
            lease = (await alice.register(ALICE)).lease
        await run.coordinator.order("pause")
    async with running(tmp_path) as run, run.site(ALICE) as alice:
        assert (await alice.beat(ALICE, lease)).order == 2
        assert run.coordinator.nodes()[0]["activity"] == "pause"


async def test_a_site_that_falls_silent_and_comes_back_is_an_event_each_also_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        async with run.site(ALICE) as alice:
            lease = (await alice.register(ALICE)).lease
        run.clock.now = LEASE_SECONDS
        await run.coordinator.expire()
        await run.coordinator.expire()
        assert not run.coordinator.nodes()[0]["alive"]
    async with running(tmp_path) as run:
        run.clock.now = LEASE_SECONDS
        await run.coordinator.expire()  # it was gone before: no news
        async with run.site(ALICE) as alice:
            await alice.beat(ALICE, lease)
        texts = [fact.body["text"] for fact in run.coordinator.store.facts() if fact.kind == "event"]
    assert texts[-2:] == ["lab-0 is silent for 15 s", "lab-0 is back after 15 s"]


async def test_who_fell_silent_or_came_back_while_the_database_was_full_is_an_event_later(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE, BOB)
        store, expire = run.coordinator.store, run.coordinator.expire
        async with run.site(ALICE) as alice, run.site(BOB) as bob:
            lease = (await alice.register(ALICE)).lease
            await bob.register(BOB)
            run.clock.now = LEASE_SECONDS
            await alice.beat(ALICE, lease)
            await store.do(Transaction.execute, FULL)
            with pytest.raises(sqlite3.Error, match="full"):
                await expire()
            run.clock.now = 2 * LEASE_SECONDS
            with pytest.raises(sqlite3.Error, match="full"):
                await expire()
            await store.do(Transaction.execute, "DROP TRIGGER full")
            await expire()
            await expire()
            await alice.beat(ALICE, lease)
        texts = [fact.body["text"] for fact in store.facts() if fact.kind == "event"]
        gone = {site.name: site.gone for site in store.sites()}
    assert texts[-3:] == ["lab-1 is silent for 15 s", "lab-0 is silent for 15 s", "lab-0 is back after 15 s"]
    assert gone == {"lab-0": False, "lab-1": True}


async def test_the_list_of_revoked_sites_grows_over_restarts_and_clocks_that_are_set_back(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        assert run.coordinator.revocations == 0
        await run.let_in(ALICE, BOB, CAROL)
        await run.coordinator.revoke("lab-1")
        assert run.coordinator.revocations == NOW * 1000
    async with running(tmp_path) as run:
        assert (run.coordinator.revoked, run.coordinator.revocations) == ([BOB.node], NOW * 1000)
        run.wall.now -= 3600
        await run.coordinator.revoke("lab-0")
        assert (run.coordinator.revoked, run.coordinator.revocations) == ([BOB.node, ALICE.node], NOW * 1000 + 1)


async def test_the_watch_notices_by_itself(tmp_path: Path) -> None:
    silent = asyncio.Event()
    store = open_store(tmp_path, lambda facts: silent.set() if facts[-1].body.get("level") == 30 else None)
    clock = Clock(0.0)
    coordinator = Coordinator(store, CONFIG, clock=clock)
    ticket = Ticket.make()
    await coordinator.invite(ticket.row(now=coordinator.wall()))
    coordinator.stands(await store.do(enrol, ALICE.node, "lab-a", ticket.id, coordinator.wall()))
    coordinator.registry.admit(coordinator.stands(await store.do(register, ALICE.node, registration(), 0.0)))
    clock.now = LEASE_SECONDS
    watch = asyncio.create_task(coordinator.watch_over())
    await asyncio.wait_for(silent.wait(), PATIENCE)
    watch.cancel()
    await store.close()


async def test_the_database_is_tidied_also_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidied, store = asyncio.Event(), open_store(tmp_path)

    async def tidy() -> None:
        tidied.set()

    monkeypatch.setattr(store, "tidy", tidy)
    wall, clock = itertools.count(NOW, -3600.0), itertools.count(0.0, TIDY_SECONDS)
    watch = asyncio.create_task(Coordinator(store, CONFIG, wall.__next__, clock.__next__).watch_over())
    await asyncio.wait_for(tidied.wait(), PATIENCE)
    watch.cancel()
    await store.close()


async def test_orders_are_for_sites_by_name_or_id_and_for_all(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE, BOB)
        coordinator = run.coordinator
        assert [order.node for order in await coordinator.order("pause", ["lab-1", ALICE.node])] == sorted(
            [ALICE.node, BOB.node], key=[ALICE.node, BOB.node].index
        )
        assert [order.activity for order in await coordinator.order("train")] == ["train", "train"]
        (assigned,) = await coordinator.assign({"replica": {}}, ["lab-0"])
        assert (assigned.epoch, assigned.activity) == (4, "train")
        with pytest.raises(Refused, match="there is no site 'lab-9' in this run: lab-0, lab-1"):
            await coordinator.order("stop", ["lab-0", "lab-9"])
        await coordinator.revoke("lab-0")
        with pytest.raises(Refused, match="there is no site 'lab-0' in this run: lab-1"):
            await coordinator.revoke("lab-0")
        assert [site["name"] for site in coordinator.nodes()] == ["lab-1"]


async def test_a_table_has_the_same_columns_for_a_site_that_never_spoke(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE, BOB)
        async with run.site(ALICE) as alice:
            await alice.beat(ALICE, (await alice.register(ALICE)).lease)
        first, second = run.coordinator.nodes()
    assert first.keys() == second.keys()
    assert (second["alive"], second["round"], second["assignment"], second["order"]) == (False, None, "replica", 1)


async def test_the_paths_that_count_are_the_newest_of_a_site_that_is_here(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE, BOB)
        assert run.coordinator.paths() is None
        async with run.site(ALICE) as alice, run.site(BOB) as bob:
            one, other = (await alice.register(ALICE)).lease, (await bob.register(BOB)).lease
            await alice.beat(ALICE, one, Paths(round=8, content=b"eight"))
            await bob.beat(BOB, other, Paths(round=7, content=b"seven"))
            await alice.beat(ALICE, one)
            assert run.coordinator.paths() == Paths(round=8, content=b"eight")
            run.clock.now = LEASE_SECONDS
            await bob.beat(BOB, other)
            await run.coordinator.expire()
        assert run.coordinator.paths() == Paths(round=7, content=b"seven")


async def test_what_a_site_is_to_a_pipeline_is_in_the_table(tmp_path: Path) -> None:
    place = Place(stage=2, memory=3, forward=0.5, backward=1.0, transfer={BOB.node: 0.25}, round_trip={BOB.node: 0.125})
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        async with run.site(ALICE) as alice:
            lease = (await alice.register(ALICE)).lease
            await alice.beat(ALICE, lease)
            assert run.coordinator.nodes()[0]["place"] is None
            await alice.beat(ALICE, lease, place=place)
        assert run.coordinator.nodes()[0]["place"] == {
            "stage": 2,
            "memory": 3,
            "forward": 0.5,
            "backward": 1.0,
            "loss": 0.0,
            "transfer": {BOB.node: 0.25},
            "round_trip": {BOB.node: 0.125},
        }


def test_open_invites_come_before_those_that_are_only_told_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier_coordinator.store.sites.OPEN_INVITES", 3)
    used = [Ticket.make(f"used-{number}").row(uses=0, now=float(number)) for number in range(3)]
    still_open = [Ticket.make(f"open-{number}").row(now=0.0) for number in range(2)]
    assert [invite.id for invite in trusted([*used, *still_open], 1.0)] == ["open-0", "open-1", "used-2"]
