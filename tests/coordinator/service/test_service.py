from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from coordinator.cases import (
    ALICE,
    AUTHORITY,
    BOB,
    CAROL,
    CONFIG,
    NOW,
    OWN,
    TOKEN,
    Clock,
    Running,
    Ticket,
    register_request,
    report_request,
    running,
)
from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.runs.sites import HEARTBEAT_SECONDS
from pier_coordinator.service import service as limits
from pier_coordinator.service.bounds import MESSAGE_BYTES
from pier_coordinator.service.service import PUSHBACK, RATES, CoordinatorService, Limits, Rate
from pier_coordinator.store.sites import TooFast
from pier_node.base.errors import PierError
from pier_node.config.run import from_canonical
from pier_node.identity.certificates import credentials, node_id_of_certificate
from pier_node.identity.node import Token
from pier_node.rounds.revocations import Revoked
from pier_proto.v1.coordinator_pb2 import Order

Code = grpc.StatusCode


@pytest.fixture
async def run(tmp_path: Path) -> AsyncGenerator[Running]:
    async with running(tmp_path) as run:
        yield run


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


# --- coming in -------------------------------------------------------------------------------------


async def test_an_invite_makes_a_site_one_of_the_run(run: Running) -> None:
    ticket = Ticket.make()
    await run.coordinator.invite(ticket.row())
    async with run.caller(ticket.credentials) as guest:
        reply = await guest.enrol(ticket.request(ALICE))
    assert node_id_of_certificate(reply.certificate) == ALICE.node
    assert from_canonical(reply.run_config) == CONFIG
    assert reply.node == OWN.node
    own = replace(credentials(ALICE, TOKEN), cert_pem=reply.certificate, ca_pem=reply.authority)
    async with run.caller(own) as alice:
        assert (await alice.register(ALICE)).founder == ALICE.node
    assert run.coordinator.nodes()[0]["name"] == "lab-a"


async def test_a_stranger_without_a_certificate_of_the_run_does_not_get_through(run: Running) -> None:
    async with run.caller(Ticket.make("never made").credentials) as stranger:
        code, _ = await refused(stranger.register(ALICE))
    assert code is Code.UNAVAILABLE
    authority = credentials(OWN, TOKEN).ca_pem
    async with run.caller(replace(credentials(ALICE, Token(b"x" * 32, TOKEN.run)), ca_pem=authority)) as other_run:
        code, _ = await refused(other_run.register(ALICE))
    assert code is Code.UNAVAILABLE


async def test_an_invite_for_one_lets_no_second_site_in_and_the_first_again(run: Running) -> None:
    ticket = Ticket.make()
    await run.coordinator.invite(ticket.row())
    async with run.caller(ticket.credentials) as guest:
        await guest.enrol(ticket.request(ALICE))
        await guest.enrol(ticket.request(ALICE))  # the answer got lost
    async with run.caller(ticket.credentials) as second:
        code, text = await refused(second.enrol(ticket.request(BOB, name="lab-b")))
    assert (code, text) == (Code.FAILED_PRECONDITION, "this invite was used already")


@pytest.mark.parametrize("why", ["has expired", "was revoked"])
async def test_an_invite_that_is_no_good_any_more_says_so(run: Running, why: str) -> None:
    ticket = Ticket.make()
    await run.coordinator.invite(ticket.row(hours=1))
    if why == "was revoked":
        await run.coordinator.revoke_invite(ticket.id)
    run.wall.now += 3600
    async with run.caller(ticket.credentials) as guest:
        code, text = await refused(guest.enrol(ticket.request(ALICE, time=run.wall())))
    assert code is Code.FAILED_PRECONDITION
    assert f"this invite {why}" in text


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"protocol": 0}, Code.FAILED_PRECONDITION, "your Pier is older"),
        ({"time": NOW - 3660}, Code.FAILED_PRECONDITION, "your clock is 61 minutes behind the coordinator's"),
        ({"name": "lab-0"}, Code.FAILED_PRECONDITION, "is called lab-0 already: start with another --name"),
        ({"proof": b"forged"}, Code.INVALID_ARGUMENT, "EnrolRequest.proof is not this invite"),
        ({"public_key": b"?"}, Code.INVALID_ARGUMENT, "EnrolRequest.public_key is no public key"),
    ],
)
async def test_what_is_wrong_with_an_enrolment_is_said(
    run: Running, fields: dict[str, Any], code: grpc.StatusCode, text: str
) -> None:
    await run.let_in(BOB)
    ticket = Ticket.make()
    await run.coordinator.invite(ticket.row())
    async with run.caller(ticket.credentials) as guest:
        refusal = await refused(guest.enrol(ticket.request(ALICE, **fields)))
        assert refusal[0] is code
        assert text in refusal[1]
        await guest.enrol(ticket.request(ALICE))  # the invite was not used up by that


async def test_a_proof_for_one_invite_is_none_for_another(run: Running) -> None:
    first, second = Ticket.make("first"), Ticket.make("second")
    for ticket in (first, second):
        await run.coordinator.invite(ticket.row())
    async with run.caller(second.credentials) as guest:
        code, _ = await refused(guest.enrol(first.request(ALICE)))
    assert code is Code.INVALID_ARGUMENT


async def test_the_holder_of_an_invite_can_do_nothing_else_with_it(run: Running) -> None:
    ticket = Ticket.make()
    await run.coordinator.invite(ticket.row())
    async with run.caller(ticket.credentials) as guest:
        code, text = await refused(guest.register(ALICE))
    assert code is Code.PERMISSION_DENIED
    assert "for Enrol only" in text


async def test_a_node_cannot_enrol_with_its_own_certificate(run: Running) -> None:
    await run.let_in(ALICE)
    async with run.site(ALICE) as alice:
        code, text = await refused(alice.enrol(Ticket.make().request(ALICE)))
    assert code is Code.FAILED_PRECONDITION
    assert "does not know this invite" in text


# --- registering -----------------------------------------------------------------------------------


async def test_sites_learn_of_each_other_and_what_is_theirs(run: Running) -> None:
    await run.let_in(ALICE, BOB)
    async with run.site(ALICE) as alice, run.site(BOB) as bob:
        first, second = await alice.register(ALICE), await bob.register(BOB, name="lab-b")
    assert (first.founder, first.slot, list(first.roster)) == (ALICE.node, 0, [])
    assert (second.founder, second.slot) == (ALICE.node, 1)
    assert [(site.node, site.name, site.address) for site in second.roster] == [(ALICE.node, "lab-0", "10.0.0.1:7700")]
    assert second.order == Order(epoch=1, activity=Order.ACTIVITY_TRAIN, assignment=second.order.assignment)
    assert second.order.assignment.HasField("replica")
    assert [fact.body["name"] for fact in run.told if fact.kind == "site"] == ["lab-0", "lab-b"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"run_hash": bytes(32)}, "your configuration is of run 00000000, this coordinator's run is"),
        ({"protocol": 99}, "upgrade Pier on the coordinator's machine"),
        ({"name": "lab-1"}, f"another site, node {BOB.node}, is called lab-1 already"),
    ],
)
async def test_what_is_wrong_with_a_registration_is_said(run: Running, fields: dict[str, Any], text: str) -> None:
    await run.let_in(ALICE, BOB)
    async with run.site(ALICE) as alice:
        code, said = await refused(alice.register(ALICE, **fields))
    assert code is Code.FAILED_PRECONDITION
    assert text in said


async def test_nobody_registers_for_another(run: Running) -> None:
    await run.let_in(ALICE, BOB)
    async with run.site(ALICE) as alice:
        code, _ = await refused(alice.raw("Register", register_request(BOB).SerializeToString()))
    assert code is Code.INVALID_ARGUMENT


async def test_a_node_that_was_never_let_in_is_told_to_ask_for_an_invite(run: Running) -> None:
    async with run.site(CAROL) as carol:
        code, text = await refused(carol.register(CAROL))
    assert code is Code.PERMISSION_DENIED
    assert "ask its operator for an invite" in text


async def test_a_revoked_node_is_out_at_once_and_the_others_hear_of_it(run: Running, tmp_path: Path) -> None:
    await run.let_in(ALICE, BOB)
    async with run.site(ALICE) as alice, run.site(BOB) as bob:
        gone, here = await alice.register(ALICE), await bob.register(BOB)
        orders = alice.watch(gone.lease)
        await anext(orders)
        await run.coordinator.revoke("lab-0")
        for call in (alice.beat(ALICE, gone.lease), alice.register(ALICE), anext(orders)):
            code, text = await refused(call)
            assert code is Code.PERMISSION_DENIED
            assert "was revoked by the run's operator" in text
        told = (await bob.beat(BOB, here.lease)).revocations
        assert list(told.nodes) == [ALICE.node]
        assert not (await bob.beat(BOB, here.lease, knows=told.version)).HasField("revocations")
        again = await bob.register(BOB)
        assert (list(again.roster), again.revocations) == ([], told)
        barred = set[str]()
        Revoked(tmp_path, credentials(BOB, TOKEN).ca_pem, CONFIG.hash(), barred.update).take(told)
        assert barred == {ALICE.node}


# --- at work ---------------------------------------------------------------------------------------


async def test_what_a_site_says_of_itself_is_shown(run: Running) -> None:
    await run.let_in(ALICE, BOB)
    async with run.site(ALICE) as alice, run.site(BOB) as bob:
        await alice.beat(ALICE, (await alice.register(ALICE)).lease, round=7, loss=2.5, tokens_per_second=100.0)
        await bob.beat(BOB, (await bob.register(BOB)).lease, round=5)
    first, second = run.coordinator.nodes()
    assert (first["alive"], first["phase"], first["round"], first["loss"]) == (True, "training", 7, 2.5)
    assert second["round"] == 5


async def test_the_lease_of_an_earlier_start_is_not_taken(run: Running) -> None:
    await run.let_in(ALICE)
    async with run.site(ALICE) as alice:
        code, _ = await refused(alice.beat(ALICE, b"lease"))
        assert code is Code.NOT_FOUND
        old = await alice.register(ALICE)
        orders = alice.watch(old.lease)
        await anext(orders)
        await alice.register(ALICE)
        for call in (alice.beat(ALICE, old.lease), anext(orders)):
            code, text = await refused(call)
            assert code is Code.ABORTED
            assert "another start of this site" in text


async def test_orders_reach_those_who_watch_and_show_in_heartbeats(run: Running) -> None:
    await run.let_in(ALICE, BOB)
    async with run.site(ALICE) as alice, run.site(BOB) as bob:
        lease, other = (await alice.register(ALICE)).lease, (await bob.register(BOB)).lease
        orders = alice.watch(lease)
        assert (await anext(orders)).activity == Order.ACTIVITY_TRAIN
        await run.coordinator.order("pause", ["lab-0"])
        paused = await anext(orders)
        assert (paused.epoch, paused.activity) == (2, Order.ACTIVITY_PAUSE)
        assert (await alice.beat(ALICE, lease)).order == 2
        assert (await bob.beat(BOB, other)).order == 1
        assert [(site["order"], site["follows"]) for site in run.coordinator.nodes()] == [(2, 1), (1, 1)]
        await run.coordinator.order("stop")
        assert (await anext(orders)).activity == Order.ACTIVITY_STOP
        assert (await bob.beat(BOB, other)).order == 2


async def test_a_site_has_one_watch(run: Running) -> None:
    await run.let_in(ALICE)
    async with run.site(ALICE) as alice:
        lease = (await alice.register(ALICE)).lease
        first, second = alice.watch(lease), alice.watch(lease)
        await anext(first)
        await anext(second)
        code, text = await refused(anext(first))
        assert (code, text) == (Code.ABORTED, "another call of this site watches its orders now")
        await run.coordinator.order("pause")
        assert (await anext(second)).activity == Order.ACTIVITY_PAUSE


async def test_a_report_that_is_sent_twice_is_stored_once(run: Running) -> None:
    await run.let_in(ALICE)
    async with run.site(ALICE) as alice:
        lease = (await alice.register(ALICE)).lease
        assert (await alice.report(report_request(lease, 0, "a", "b"))).stored == 2
        assert (await alice.report(report_request(lease, 0, "a", "b", "c"))).stored == 3
        assert (await alice.report(report_request(lease, 1, "b"))).stored == 3
    notes = [fact for fact in run.coordinator.store.facts() if fact.kind == "note"]
    assert [fact.body["text"] for fact in notes] == ["a", "b", "c"]
    assert notes == [fact for fact in run.told if fact.kind == "note"]


# --- what must not harm ----------------------------------------------------------------------------


async def test_what_is_too_large_or_no_message_is_refused(run: Running) -> None:
    await run.let_in(ALICE)
    async with run.site(ALICE) as alice:
        code, _ = await refused(alice.raw("Report", bytes(MESSAGE_BYTES + 1)))
        assert code is Code.RESOURCE_EXHAUSTED
        code, text = await refused(alice.raw("Report", b"\xff\xff"))
        assert (code, text) == (Code.INVALID_ARGUMENT, "2 bytes that are no ReportRequest")
        code, text = await refused(alice.report(report_request(b"lease", 0, *["x"] * 257)))
        assert (code, text) == (
            Code.INVALID_ARGUMENT,
            "ReportRequest.records has 257 items: must have at most 256",
        )
        code, _ = await refused(alice.raw("Surprise", b""))
        assert code is Code.UNIMPLEMENTED


async def test_who_asks_too_often_is_told_when_to_ask_again(tmp_path: Path) -> None:
    limits = Limits({"Heartbeat": Rate(0.5, 2)}, clock=lambda: 0.0)  # a stream, and one heartbeat
    async with running(tmp_path, limits) as run:
        await run.let_in(ALICE, BOB)
        async with run.site(ALICE) as alice, run.site(BOB) as bob:
            await refused(alice.beat(ALICE, b"lease"))
            with pytest.raises(grpc.aio.AioRpcError, match=r"ask again in 2\.0 s") as caught:
                await alice.beat(ALICE, b"lease")
            assert caught.value.code() is Code.RESOURCE_EXHAUSTED
            assert f"('{PUSHBACK}', '2000')" in str(caught.value.trailing_metadata())
            code, _ = await refused(bob.beat(BOB, b"lease"))
            assert code is Code.NOT_FOUND


async def test_silent_streams_of_a_site_leave_room_for_the_others_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALLS", 2 * RATES["Heartbeat"].burst)
    monkeypatch.setattr(limits, "LEASE_SECONDS", 2.0)
    async with running(tmp_path) as run:
        await run.let_in(ALICE, BOB)
        async with run.site(ALICE) as alice, run.site(BOB) as bob:
            stream = alice.channel.stream_stream(f"/{limits.SERVICE}/Heartbeat", None, None)
            silent = [stream(None, timeout=30) for _ in range(limits.CALLS)]
            await asyncio.sleep(0.5)
            await bob.register(BOB)
            codes = [await call.code() for call in silent]
    assert Code.OK in codes
    assert Code.RESOURCE_EXHAUSTED in codes
    assert Code.DEADLINE_EXCEEDED not in codes, "a silent stream ends"


async def test_a_port_that_is_taken_is_an_error_that_says_so(run: Running) -> None:
    second = CoordinatorService(run.coordinator, credentials(OWN, TOKEN), AUTHORITY)
    with pytest.raises(PierError, match=f"cannot listen on 127.0.0.1:{run.port}: Address already in use"):
        await second.start("127.0.0.1", run.port)


def allowed(limits: Limits, caller: str = "a", method: str = "M") -> bool:
    try:
        limits.count(caller, method)
    except TooFast:
        return False
    return True


def test_a_burst_passes_and_then_so_many_a_second() -> None:
    clock = Clock(0.0)
    counted = Limits({"M": Rate(2, 5)}, clock)
    assert [allowed(counted) for _ in range(6)] == [True] * 5 + [False]
    with pytest.raises(TooFast, match=r"M: more than 2 calls a second; ask again in 0\.5 s") as caught:
        counted.count("a", "M")
    clock.now += caught.value.seconds
    assert [allowed(counted) for _ in range(2)] == [True, False]
    clock.now += 100
    assert [allowed(counted) for _ in range(6)] == [True] * 5 + [False]


def test_callers_and_methods_do_not_disturb_each_other() -> None:
    counted = Limits({"M": Rate(1, 1), "N": Rate(1, 1)}, Clock(0.0))
    assert allowed(counted)
    assert not allowed(counted)
    assert allowed(counted, caller="b")
    assert allowed(counted, method="N")


@given(steps=st.lists(st.floats(0, 3), max_size=60))
def test_never_more_than_the_burst_and_the_rate_pass(steps: list[float]) -> None:
    clock = Clock(0.0)
    counted = Limits({"M": Rate(2, 5)}, clock)
    passed = 0
    for step in steps:
        clock.now += step
        passed += allowed(counted)
    assert passed <= 5 + 2 * clock.now + 1e-6


def test_memory_is_bounded_and_the_busy_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUCKETS", 3)
    counted = Limits({"M": Rate(1, 1)}, Clock(0.0))
    for number in range(10):
        allowed(counted, caller="busy")
        allowed(counted, caller=str(number))
    assert len(counted) == 3
    assert not allowed(counted, caller="busy")


def test_a_well_behaved_site_stays_below() -> None:
    assert RATES["Heartbeat"].per_second >= 2 / HEARTBEAT_SECONDS
