from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from wire import samples
from wire.sites import (
    ALICE,
    BOB,
    CAROL,
    FETCH,
    LEAVING,
    MIB,
    QUICK,
    RUN,
    Sites,
    ack,
    chunks,
    impostor,
    take_all,
)

from pier_node.base.errors import PierError
from pier_node.config.run import SITES
from pier_node.wire import links
from pier_node.wire.addresses import first_hop
from pier_node.wire.carrier import (
    BEAT,
    DESCRIBE,
    GATHER,
    LEAVE,
    MESSAGE_BYTES,
    PROBE,
    PROTOCOL,
    Chunk,
    PeerLost,
    PeerRefused,
)
from pier_node.wire.links import CallMetadata, SiteCarrier
from pier_proto.v1.peer_pb2 import (
    Ack,
    Ballot,
    FetchRequest,
    LeaveRequest,
    Manifest,
    ProbeReply,
    ProbeRequest,
    Proposal,
    Pulse,
    Signed,
    StateRequest,
    Value,
)


async def refused(carrier: SiteCarrier, peer: str) -> str:
    with pytest.raises(PeerRefused) as error:
        await carrier.call(peer, LEAVE, LEAVING, QUICK)
    return error.value.reason


async def test_another_run_is_refused(sites: Sites) -> None:
    stranger = sites.carrier(ALICE, run=b"\xee" * 32)
    async with sites.listening(BOB) as (bob, address):
        bob.serve(LEAVE, ack)
        stranger.introduce(bob.node, address)
        assert await refused(stranger, bob.node) == f"this is run {RUN.hex()[:8]}, the caller is in run eeeeeeee"
        with pytest.raises(PeerRefused, match="this is run"):
            await stranger.push(bob.node, chunks(100))
    await stranger.stop()


async def test_a_stale_address_is_noticed(sites: Sites) -> None:
    alice = sites.carrier(ALICE)
    async with sites.listening(BOB) as (bob, address):
        bob.serve(LEAVE, ack)
        alice.introduce(CAROL.node, address)
        with pytest.raises(PeerLost, match=f"another node answers there|node {BOB.node} answers here"):
            await alice.call(CAROL.node, LEAVE, LEAVING, QUICK)
    await alice.stop()


async def test_another_protocol_is_refused(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sites.pair() as (alice, bob):
        bob.serve(LEAVE, ack)
        spoken = CallMetadata.call
        monkeypatch.setattr(CallMetadata, "call", lambda metadata, to: {**spoken(metadata, to), "pier-protocol": "1"})
        said = await refused(alice, bob.node)
        assert said == f"this node speaks protocol {PROTOCOL}, the caller '1': install one version of Pier"


async def test_nobody_speaks_for_another(secured: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    async with secured.pair() as (alice, bob):
        bob.serve(LEAVE, ack)
        spoken = CallMetadata.call
        monkeypatch.setattr(
            CallMetadata, "call", lambda metadata, to: {**spoken(metadata, to), "pier-node": CAROL.node}
        )
        assert "its certificate is of" in await refused(alice, bob.node)


async def test_a_forged_certificate_makes_no_caller(secured: Sites) -> None:
    mallory = secured.carrier(impostor(CAROL, ALICE.node))
    async with secured.listening(BOB) as (bob, address):
        bob.serve(LEAVE, ack)
        mallory.introduce(bob.node, address)
        assert "names another node than its key" in await refused(mallory, bob.node)
    await mallory.stop()


async def test_a_forged_certificate_makes_no_peer(secured: Sites) -> None:
    alice = secured.carrier(ALICE)
    async with secured.listening(impostor(CAROL, BOB.node)) as (mallory, address):
        mallory.serve(LEAVE, ack)
        alice.introduce(BOB.node, address)
        with pytest.raises(PeerLost, match=f"{CAROL.node} answers (there|here)|names another node than its key"):
            await alice.call(BOB.node, LEAVE, LEAVING, QUICK)
    await alice.stop()


async def test_nobody_has_to_do_with_a_node_that_was_revoked(secured: Sites) -> None:
    async with secured.pair() as (alice, bob):
        for carrier in (alice, bob):
            carrier.serve(LEAVE, ack)
        await alice.call(bob.node, LEAVE, LEAVING, QUICK)
        bob.refuse([alice.node], "was revoked")
        with pytest.raises(PeerLost):
            await alice.call(bob.node, LEAVE, LEAVING, QUICK)
        with pytest.raises(PeerLost):
            await bob.call(alice.node, LEAVE, LEAVING, QUICK)


async def test_messages_out_of_bounds_are_refused_both_ways(sites: Sites) -> None:
    async def nonsense(sender: str, pulse: Pulse) -> Pulse:
        return Pulse(site=samples.SITE, phase=99)  # type: ignore[arg-type]

    async with sites.pair() as (alice, bob):
        bob.serve(LEAVE, ack)
        bob.serve(BEAT, nonsense)
        with pytest.raises(PeerRefused, match=r"LeaveRequest\.node = '\?': must be a node id"):
            await alice.call(bob.node, LEAVE, LeaveRequest(node="?"), QUICK)
        with pytest.raises(PeerLost, match=r"its answer is not valid: Pulse\.phase = 99") as error:
            await alice.call(bob.node, BEAT, samples.PULSE, QUICK)
        assert not isinstance(error.value, PeerRefused)


async def test_chunks_out_of_bounds_are_refused_both_ways(sites: Sites) -> None:
    async def odd(sender: str = "", request: FetchRequest | None = None) -> AsyncIterator[Chunk]:
        yield Chunk(stage=Chunk.STAGE_STATE, offset=1 << 60)

    async with sites.pair() as (alice, bob):
        bob.serve_push(take_all)
        bob.serve_pull(odd)
        with pytest.raises(PeerRefused, match=r"Chunk\.offset = 1152921504606846976"):
            await alice.push(bob.node, odd())
        with pytest.raises(PeerLost, match=r"its answer is not valid: Chunk\.offset = 1152921504606846976"):
            await anext(alice.pull(bob.node, FETCH))


async def test_a_message_that_is_too_large_is_refused(sites: Sites) -> None:
    asked: list[int] = []

    async def probe(sender: str, request: ProbeRequest) -> ProbeReply:
        asked.append(len(request.padding))
        return ProbeReply(padding=bytes(3 * MIB))

    async with sites.pair() as (alice, bob):
        bob.serve(PROBE, probe)
        with pytest.raises(PeerRefused, match="larger than max"):
            await alice.call(bob.node, PROBE, ProbeRequest(padding=bytes(MESSAGE_BYTES)), QUICK)
        assert asked == []
        with pytest.raises(PeerLost, match="larger than max"):
            await alice.call(bob.node, PROBE, ProbeRequest(), QUICK)


async def test_only_a_manifest_may_be_long(sites: Sites) -> None:
    long = Manifest(digest=samples.HASH, piece_length=1)
    for name in ("anchor", "momentum"):
        long.tensors.add(name=name, length=100_000, hashes=[samples.HASH] * 100_000)

    async def describe(sender: str, request: object) -> Manifest:
        return long

    async with sites.pair() as (alice, bob):
        bob.serve(DESCRIBE, describe)
        assert await alice.call(bob.node, DESCRIBE, StateRequest(), 2 * QUICK) == long


async def test_a_proposal_of_many_that_have_all_voted_arrives(sites: Sites) -> None:
    """Each of their announcements names all who took part in the attempt that they voted in."""
    nodes = [f"{number:016x}" for number in range(SITES)]
    ballot = Ballot(number=7, leader=nodes[0])
    voted = Value(origin=ballot, digest=samples.HASH, members=nodes)
    proposal = Proposal(verdict=Proposal.VERDICT_GO, round=9, ballot=Ballot(number=8, leader=nodes[0]), adopt=voted)
    for node in nodes:
        proposal.shares.add(node=node)
        said = samples.changed(samples.READY, node=node, voted=voted, voted_in=ballot).SerializeToString()
        proposal.readies.add(node=node, statement=said, public=bytes(91), signature=bytes(72))

    async def gather(sender: str, request: Signed) -> Proposal:
        return proposal

    async with sites.pair() as (alice, bob):
        bob.serve(GATHER, gather)
        assert await alice.call(bob.node, GATHER, samples.SIGNED[0], 2 * QUICK) == proposal


async def test_a_handler_that_fails_is_logged_and_told(sites: Sites, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(sender: str, request: LeaveRequest) -> Ack:
        raise ZeroDivisionError("secret detail")

    async def fail_stream(sender: str, stream: AsyncIterator[Chunk]) -> None:
        raise ZeroDivisionError("secret detail")

    async with sites.pair() as (alice, bob):
        bob.serve(LEAVE, fail)
        bob.serve_push(fail_stream)
        with pytest.raises(PeerLost, match="it failed to answer, see its log: ZeroDivisionError"):
            await alice.call(bob.node, LEAVE, LEAVING, QUICK)
        with pytest.raises(PeerLost, match="see its log: ZeroDivisionError"):
            await alice.push(bob.node, chunks(100))
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage().partition(",")[0] for record in logged] == ["Leave", "Exchange"]
    assert all(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in logged)


async def test_a_method_that_is_not_served_is_refused(sites: Sites) -> None:
    async with sites.pair() as (alice, bob):
        assert await refused(alice, bob.node) == "it does not answer that, or not yet"
        with pytest.raises(PeerRefused, match="no streams are taken here yet"):
            await alice.push(bob.node, chunks(100))
        with pytest.raises(PeerRefused, match="it does not answer that, or not yet"):
            await anext(alice.pull(bob.node, FETCH))


async def test_a_peer_has_only_so_many_calls_under_way(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CALLS_PER_PEER", 2)
    under_way, free = asyncio.Semaphore(0), asyncio.Event()

    async def hold(sender: str, request: LeaveRequest) -> Ack:
        under_way.release()
        await free.wait()
        return Ack()

    carol = sites.carrier(CAROL)
    async with sites.pair() as (alice, bob), sites.listening(BOB) as (twin, address):
        for node in (bob, twin):
            node.serve(LEAVE, hold)
        carol.introduce(BOB.node, address)
        asked = [asyncio.create_task(alice.call(bob.node, LEAVE, LEAVING, QUICK)) for _ in range(2)]
        for _ in asked:
            await under_way.acquire()
        assert await refused(alice, bob.node) == f"2 calls of {alice.node} are under way already"
        asked.append(asyncio.create_task(carol.call(BOB.node, LEAVE, LEAVING, QUICK)))
        await under_way.acquire()
        free.set()
        assert await asyncio.gather(*asked) == [Ack()] * 3
        assert await alice.call(bob.node, LEAVE, LEAVING, QUICK) == Ack()
    await carol.stop()


async def test_a_port_in_use_is_reported(sites: Sites) -> None:
    async with sites.listening(ALICE) as (_, address):
        with pytest.raises(PierError, match=f"cannot listen on {first_hop(address)}: Address already in use") as error:
            await sites.carrier(BOB).listen(first_hop(address), None, [])
    assert "--listen" in error.value.remedy
    with pytest.raises(PierError, match=r"cannot listen on 192\.0\.2\.1:7700: Cannot assign requested address"):
        await sites.carrier(BOB).listen("192.0.2.1:7700", None, [])
