from __future__ import annotations

import asyncio
import socket

import pytest
from wire.sites import ALICE, BOB, CAROL, MIB, OTHER_TOKEN, RUN, Sites

from pier_node.wire import probe
from pier_node.wire.carrier import HELLO, PROBE, PROTOCOL, BadMessage, PeerRefused
from pier_node.wire.links import SiteCarrier
from pier_node.wire.probe import Allowance, ProbeServer
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, ProbeReply, ProbeRequest, Site

SECURE = Sites(secure=True)


async def ask(carrier: SiteCarrier, **fields: object) -> ProbeReply:
    return await carrier.call(BOB.node, PROBE, ProbeRequest(**fields), 10.0)  # type: ignore[arg-type]


def welcome(carrier: SiteCarrier) -> None:
    """Answer hellos as a node does."""

    async def answer(sender: str, request: HelloRequest) -> HelloReply:
        assert (request.protocol, request.run_hash, request.site.node) == (PROTOCOL, RUN, sender)
        assert not request.site.address, "who only looks is not a site of the run"
        return HelloReply(protocol=PROTOCOL, run_hash=RUN, run_config="{}", site=Site(node=carrier.node))

    carrier.serve(HELLO, answer)


async def test_bytes_and_the_time() -> None:
    async with SECURE.pair() as (alice, bob):
        ProbeServer(bob, RUN, clock=lambda: 1234.5)
        reply = await ask(alice, padding=bytes(MIB), reply_size=1000)
        assert (len(reply.padding), reply.time, reply.reached) == (1000, 1234.5, False)
        assert len((await ask(alice, reply_size=MIB)).padding) == MIB
        assert len(set(reply.padding)) > 200, "noise: a line that compresses must not gain by it"


async def test_a_site_that_listens_is_reached_where_it_is_and_no_other() -> None:
    async with SECURE.listening(BOB) as (bob, at_bob), SECURE.listening(CAROL) as (carol, at_carol):
        ProbeServer(bob, RUN)
        welcome(carol)
        carol.introduce(bob.node, at_bob)
        reply = await ask(carol, call_back=at_carol)
        assert (reply.reached, reply.detail) == (True, "")
        async with SECURE.listening(ALICE) as (alice, _):
            alice.introduce(bob.node, at_bob)
            reply = await ask(alice, call_back=at_carol)
        assert not reply.reached
        assert reply.detail == f"{at_carol}: another node answers there, {CAROL.node}"


async def test_a_closed_port_is_said() -> None:
    async with SECURE.pair() as (alice, bob):
        ProbeServer(bob, RUN)
        reply = await ask(alice, call_back="127.0.0.1:9")
        assert not reply.reached
        assert reply.detail == "127.0.0.1:9: connection refused: nothing listens there"


async def test_nobody_is_sent_to_knock_at_other_doors() -> None:
    with socket.create_server(("127.0.0.2", 0)) as door:
        door.setblocking(False)
        address = f"127.0.0.2:{door.getsockname()[1]}"
        async with SECURE.pair() as (alice, bob):
            ProbeServer(bob, RUN)
            reply = await ask(alice, call_back=address, seen_as=address)
            assert (reply.reached, reply.declined) == (False, True)
            assert reply.detail.startswith(f"it does not try {address}: the call came from 127.0.0.1:")
            with pytest.raises(BlockingIOError):
                door.accept()


async def test_a_site_is_called_at_the_address_that_the_roster_has_for_it_and_no_other() -> None:
    known = {ALICE.node: "127.0.0.2:9", CAROL.node: "127.0.0.3:9"}
    async with SECURE.pair() as (alice, bob):
        ProbeServer(bob, RUN, known=lambda node: known.get(node, ""))
        assert "127.0.0.2:9: connection refused" in (await ask(alice, call_back="127.0.0.2:9")).detail
        assert (await ask(alice, call_back="127.0.0.3:9")).declined


async def test_a_name_is_that_of_the_caller_if_it_leads_there() -> None:
    async with SECURE.pair() as (alice, bob):
        ProbeServer(bob, RUN)
        assert "127.0.0.1:9: connection refused" in (await ask(alice, call_back="localhost:9")).detail
        assert (await ask(alice, call_back="no-such-host.invalid:9")).declined


async def test_another_run_at_the_address_is_not_reached() -> None:
    async with SECURE.pair() as (alice, bob), SECURE.listening(CAROL, token=OTHER_TOKEN) as (carol, at_carol):
        ProbeServer(bob, RUN)
        welcome(carol)
        reply = await ask(alice, call_back=at_carol)
        assert not reply.reached
        assert "tokens differ" in reply.detail


async def test_nobody_is_knocked_at_by_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CALL_BACKS", 1)
    async with SECURE.pair() as (alice, bob), SECURE.listening(CAROL) as (carol, at_carol):
        ProbeServer(bob, RUN)
        called, go_on = asyncio.Event(), asyncio.Event()

        async def wait(sender: str, request: HelloRequest) -> HelloReply:
            called.set()
            await go_on.wait()
            return HelloReply(protocol=PROTOCOL, run_hash=RUN, run_config="{}", site=Site(node=carol.node))

        carol.serve(HELLO, wait)
        first = asyncio.create_task(ask(alice, call_back=at_carol))
        await called.wait()
        with pytest.raises(PeerRefused, match="calls others back already"):
            await ask(alice, call_back=at_carol)
        go_on.set()
        assert f"another node answers there, {CAROL.node}" in (await first).detail


async def test_nobody_is_measured_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ALLOWANCE", 2 * MIB)
    async with SECURE.pair() as (alice, bob):
        ProbeServer(bob, RUN)
        await ask(alice, padding=bytes(MIB), reply_size=MIB - 1000)
        with pytest.raises(PeerRefused, match="measured enough for now: ask again in"):
            await ask(alice, padding=bytes(MIB))
        with pytest.raises(PeerRefused, match="measured enough for now"):
            await ask(alice, call_back="127.0.0.1:9")


def test_what_was_spent_comes_back_evenly() -> None:
    now = [100.0]
    allowance = Allowance(600, lambda: now[0])
    allowance.spend(600)
    now[0] += 10
    allowance.spend(100)
    with pytest.raises(BadMessage, match="ask again in 5 s"):
        allowance.spend(50)
    now[0] += 3600
    allowance.spend(600)
    with pytest.raises(BadMessage, match="ask again in 60 s"):
        allowance.spend(600)
