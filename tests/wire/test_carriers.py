from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from wire import samples
from wire.sites import (
    ALICE,
    BOB,
    CAROL,
    LEAVING,
    MIB,
    OTHER_TOKEN,
    QUICK,
    RUN,
    Pair,
    Sites,
    ack,
    endless,
    hold,
    port_of,
    take_all,
)

from pier_node.wire import links
from pier_node.wire.carrier import (
    ABORT,
    BEAT,
    DESCRIBE,
    GATHER,
    HELLO,
    LEAVE,
    PROBE,
    VOTE,
    Carrier,
    Chunk,
    Method,
    PeerLost,
    PeerRefused,
)
from pier_node.wire.libp2p import server
from pier_node.wire.links import SiteCarrier
from pier_proto.v1.peer_pb2 import (
    AbortNotice,
    Ack,
    FetchRequest,
    HelloReply,
    HelloRequest,
    LeaveRequest,
    ProbeReply,
    ProbeRequest,
    Pulse,
    Site,
    StateRequest,
)

FETCH = FetchRequest(round=1, tensor="anchor", length=1)

pytestmark = pytest.mark.usefixtures("no_complaints")

METHODS: list[tuple[Method[Any, Any], Message, Message]] = [
    (HELLO, HelloRequest(protocol=1, run_hash=RUN, site=samples.SITE), samples.HELLO_REPLY),
    (BEAT, samples.PULSE, Pulse(site=samples.SITE)),
    (LEAVE, LEAVING, Ack()),
    (GATHER, samples.SIGNED[0], samples.PROPOSAL),
    (VOTE, samples.SIGNED[0], Ack()),
    (ABORT, AbortNotice(node=ALICE.node, ballot=samples.BALLOT), Ack()),
    (DESCRIBE, StateRequest(round=1), samples.MANIFEST),
    (PROBE, ProbeRequest(padding=bytes(MIB)), ProbeReply(padding=bytes(MIB))),
]


async def test_it_is_a_carrier(sites: Sites) -> None:
    carrier: Carrier = sites.carrier(ALICE)
    assert carrier.node == ALICE.node


@pytest.mark.parametrize(("method", "request_", "reply"), METHODS, ids=[method.name for method, _, _ in METHODS])
async def test_every_method_is_carried(pair: Pair, method: Method[Any, Any], request_: Message, reply: Message) -> None:
    alice, bob = pair
    asked: list[tuple[str, bytes]] = []

    async def answer(sender: str, message: Message) -> Message:
        asked.append((sender, message.SerializeToString()))
        return reply

    bob.serve(method, answer)
    answered = await alice.call(bob.node, method, request_, QUICK)
    if isinstance(request_, ProbeRequest):  # the carrier says in it where the call came from
        request_ = ProbeRequest(padding=request_.padding, seen_as=ProbeRequest.FromString(asked[0][1]).seen_as)
    assert asked == [(alice.node, request_.SerializeToString())]
    if isinstance(answered, HelloReply):
        assert answered.seen_as.startswith("127.0.0.1:")
        answered.seen_as = samples.HELLO_REPLY.seen_as
    assert answered == reply


async def test_greeting_takes_nothing_but_an_address(sites: Sites) -> None:
    async def hello(sender: str, request: HelloRequest) -> HelloReply:
        return HelloReply(protocol=1, run_hash=RUN, run_config=f"asked by {sender}", site=Site(node=BOB.node))

    newcomer = sites.carrier(ALICE, run=b"")
    async with sites.listening(BOB) as (bob, address):
        bob.serve(HELLO, hello)
        bob.serve(LEAVE, ack)
        reply = await newcomer.greet(address, HelloRequest(protocol=1), QUICK)
        assert reply.run_config == f"asked by {ALICE.node}"
        newcomer.introduce(bob.node, address)
        with pytest.raises(PeerRefused, match="this is run"):
            await newcomer.call(bob.node, LEAVE, LEAVING, QUICK)
    await newcomer.stop()


async def test_greeting_one_that_calls_itself_another_fails(sites: Sites) -> None:
    async def hello(sender: str, request: HelloRequest) -> HelloReply:
        return HelloReply(protocol=1, run_hash=RUN, site=Site(node=CAROL.node))

    alice = sites.carrier(ALICE)
    async with sites.listening(BOB) as (bob, address):
        bob.serve(HELLO, hello)
        with pytest.raises(PeerLost, match=f"node {BOB.node} calls itself {CAROL.node}"):
            await alice.greet(address, HelloRequest(protocol=1), QUICK)
    await alice.stop()


async def test_an_asker_that_goes_away_cancels_the_answer(pair: Pair) -> None:
    alice, bob = pair
    asked, ended = asyncio.Event(), asyncio.Event()

    async def hold(sender: str, request: LeaveRequest) -> Ack:
        asked.set()
        try:
            return await asyncio.Event().wait() and Ack()
        finally:
            ended.set()

    bob.serve(LEAVE, hold)
    call = asyncio.create_task(alice.call(bob.node, LEAVE, LEAVING, 60))
    await asyncio.wait_for(asked.wait(), QUICK)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(ended.wait(), QUICK)
    with pytest.raises(PeerLost, match=r"no answer within 0\.2 s"):
        await alice.call(bob.node, LEAVE, LEAVING, 0.2)


async def test_a_peer_is_found_where_it_was_last_seen(sites: Sites) -> None:
    alice = sites.carrier(ALICE)
    with pytest.raises(PeerLost, match="nobody said yet where it is reached"):
        await alice.call(CAROL.node, LEAVE, LEAVING, QUICK)
    alice.introduce(CAROL.node, sites.nowhere())
    with pytest.raises(PeerLost, match=f"{sites.nowhere()}: connection refused: nothing listens there"):
        await alice.call(CAROL.node, LEAVE, LEAVING, QUICK)
    async with sites.listening(CAROL) as (carol, address):
        carol.serve(LEAVE, ack)
        alice.introduce(CAROL.node, address)
        assert await alice.call(CAROL.node, LEAVE, LEAVING, QUICK) == Ack()
    await alice.stop()


async def test_moving_a_peer_ends_what_is_under_way_there(sites: Sites, pair: Pair) -> None:
    alice, bob = pair
    asked = asyncio.Event()

    async def hold(sender: str, request: LeaveRequest) -> Ack:
        asked.set()
        return await asyncio.Event().wait() and Ack()

    bob.serve(LEAVE, hold)
    call = asyncio.create_task(alice.call(bob.node, LEAVE, LEAVING, 60))
    await asyncio.wait_for(asked.wait(), QUICK)
    alice.introduce(bob.node, sites.nowhere())
    with pytest.raises(PeerLost, match="this node closed the connection"):
        await asyncio.wait_for(call, QUICK)


async def test_a_peer_that_comes_back_is_found_again(sites: Sites, tmp_path: Path) -> None:
    async with sites.listening(BOB, folder=tmp_path) as (bob, address):
        alice = sites.carrier(ALICE)
        alice.introduce(bob.node, address)
        bob.serve(LEAVE, ack)
        await alice.call(bob.node, LEAVE, LEAVING, QUICK)
    for _ in range(20):  # back off as far as it goes
        with pytest.raises(PeerLost):
            await alice.call(BOB.node, LEAVE, LEAVING, QUICK)
    async with sites.listening(BOB, port=port_of(address), folder=tmp_path) as (bob, _), asyncio.timeout(QUICK):
        bob.serve(LEAVE, ack)
        while True:
            with suppress(PeerLost):
                await alice.call(bob.node, LEAVE, LEAVING, QUICK)
                break
            await asyncio.sleep(0.01)
    await alice.stop()


async def test_stopping_is_quick_whatever_is_under_way(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (links, server):  # it does not wait for that
        monkeypatch.setattr(module, "PATIENCE", 600.0)

    async def pull_all(carrier: SiteCarrier, peer: str) -> None:
        async for _ in carrier.pull(peer, FETCH):
            pass

    async def never_read(sender: str, stream: AsyncIterator[Chunk]) -> None:
        await asyncio.Event().wait()

    async with sites.pair() as (alice, bob):
        bob.serve_pull(endless)
        bob.serve(LEAVE, hold)
        bob.serve(BEAT, lambda sender, pulse: asyncio.sleep(0, pulse))
        bob.serve_push(never_read)
        alice.serve_push(take_all)
        work = [
            asyncio.create_task(pull_all(alice, bob.node)),
            asyncio.create_task(alice.push(bob.node, endless())),
            asyncio.create_task(bob.push(alice.node, endless())),
            asyncio.create_task(alice.call(bob.node, LEAVE, LEAVING, 60)),
        ]
        await alice.call(bob.node, BEAT, samples.PULSE, QUICK)
        async with asyncio.timeout(QUICK):
            await bob.stop()
        done, pending = await asyncio.wait(work, timeout=QUICK)
        assert not pending
        assert {type(task.exception()) for task in done} == {PeerLost}
        with pytest.raises(PeerLost, match="this node is stopping"):
            await bob.call(alice.node, LEAVE, LEAVING, QUICK)


async def test_tokens_of_different_runs_do_not_meet(secured: Sites) -> None:
    async with (
        secured.listening(ALICE) as (alice, at_alice),
        secured.listening(BOB, token=OTHER_TOKEN) as (bob, at_bob),
    ):
        alice.introduce(bob.node, at_bob)
        bob.introduce(alice.node, at_alice)
        for asker, other in ((alice, bob.node), (bob, alice.node)):
            with pytest.raises(PeerLost, match="its certificate is of another run: the tokens differ"):
                await asker.call(other, LEAVE, LEAVING, QUICK)


SECURE_WORDS = {"grpc": "does not speak TLS", "hivemind": "shows no certificate: it was started with --insecure"}
INSECURE_WORDS = {"grpc": "speaks TLS and this node is --insecure", "hivemind": "not let in: it shows no certificate"}


async def test_secured_and_insecure_do_not_meet(sites: Sites) -> None:
    alice, words = sites.carrier(ALICE), (SECURE_WORDS if sites.secure else INSECURE_WORDS)[sites.transport]
    async with Sites(not sites.secure, sites.transport).listening(BOB) as (bob, address):
        alice.introduce(bob.node, address)
        with pytest.raises(PeerLost, match=words):
            await alice.call(bob.node, LEAVE, LEAVING, QUICK)
        with pytest.raises(PeerLost, match=words):
            await alice.greet(address, HelloRequest(protocol=1), QUICK)
    await alice.stop()
