from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from wire.sites import FETCH, LEAVING, MIB, QUICK, Pair, ack, chunks

from pier_node.wire import links
from pier_node.wire.carrier import LEAVE, BadMessage, Chunk, PeerLost, PeerRefused
from pier_node.wire.links import SiteCarrier
from pier_proto.v1.peer_pb2 import FetchRequest

pytestmark = pytest.mark.usefixtures("no_complaints")


class Inbox:
    """Takes pushed streams, one chunk for every permit."""

    def __init__(self, permits: int = 0) -> None:
        self.offsets: list[int] = []
        self.started = asyncio.Event()
        self.permits = asyncio.Semaphore(permits)
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def take(self, sender: str, stream: AsyncIterator[Chunk]) -> None:
        try:
            await self.permits.acquire()
            async for chunk in stream:
                self.started.set()
                assert chunk.data == bytes([chunk.offset % 256]) * len(chunk.data)
                self.offsets.append(chunk.offset)
                await self.permits.acquire()
        except PeerLost as lost:
            self.outcome.set_result(f"lost {lost.node}")
            raise
        self.outcome.set_result(f"all of {sender}")


async def test_streams_arrive_whole_and_in_order(pair: Pair) -> None:
    alice, bob = pair
    inbox = Inbox(permits=100)
    bob.serve_push(inbox.take)
    await alice.push(bob.node, chunks(20, MIB // 2))
    assert inbox.offsets == list(range(20))
    assert await inbox.outcome == f"all of {alice.node}"
    assert (alice.bytes_sent(), bob.bytes_sent()) == (10 * MIB, 0)
    assert (alice.bytes_sent_to(bob.node), alice.bytes_sent_to("f" * 16)) == (10 * MIB, 0)
    alice.count_from(7)
    assert (alice.bytes_sent(), alice.bytes_sent_to(bob.node)) == (10 * MIB + 7, 10 * MIB)


async def test_pulled_streams_arrive_whole_and_in_order(pair: Pair) -> None:
    alice, bob = pair
    asked: list[tuple[str, FetchRequest]] = []

    async def give(sender: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        asked.append((sender, request))
        async for chunk in chunks(20):
            yield chunk

    bob.serve_pull(give)
    pulled = [(chunk.offset, chunk.data) async for chunk in alice.pull(bob.node, FETCH)]
    assert pulled == [(number, bytes([number]) * MIB) for number in range(20)]
    assert asked == [(alice.node, FETCH)]
    assert (alice.bytes_sent(), bob.bytes_sent()) == (0, 20 * MIB)
    assert bob.bytes_sent_to(alice.node) == 20 * MIB


async def settled(carrier: SiteCarrier, peer: str, count: list[int]) -> int:
    """Length of a list once it did not grow during ten round trips."""
    while True:
        before = len(count)
        for _ in range(10):
            await carrier.call(peer, LEAVE, LEAVING, QUICK)
        if len(count) == before:
            return before


async def test_a_slow_receiver_holds_the_sender_back(pair: Pair) -> None:
    alice, bob = pair
    inbox, made = Inbox(), list[int]()
    bob.serve_push(inbox.take)
    bob.serve(LEAVE, ack)

    async def source() -> AsyncIterator[Chunk]:
        async for chunk in chunks(200):
            made.append(chunk.offset)
            yield chunk

    push = asyncio.create_task(alice.push(bob.node, source()))
    assert await settled(alice, bob.node, made) < 50
    for _ in range(201):
        inbox.permits.release()
    await asyncio.wait_for(push, 4 * QUICK)
    assert inbox.offsets == made == list(range(200))


async def test_a_slow_puller_holds_the_giver_back_and_may_stop(pair: Pair) -> None:
    alice, bob = pair
    made, ended = list[int](), asyncio.Event()

    async def give(sender: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        try:
            async for chunk in chunks(200):
                made.append(chunk.offset)
                yield chunk
        finally:
            ended.set()

    bob.serve_pull(give)
    bob.serve(LEAVE, ack)
    stream = alice.pull(bob.node, FETCH)
    assert (await anext(stream)).offset == 0
    assert await settled(alice, bob.node, made) < 50
    await stream.aclose()
    await asyncio.wait_for(ended.wait(), QUICK)


async def test_a_stream_that_nobody_takes_is_ended(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = pair
    first_taken, ended = asyncio.Event(), asyncio.Event()

    async def give(sender: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        try:
            async for chunk in chunks(200):
                yield chunk
                await first_taken.wait()
        finally:
            ended.set()

    bob.serve_pull(give)
    stream = alice.pull(bob.node, FETCH)
    assert (await anext(stream)).offset == 0
    monkeypatch.setattr(links, "TAKEN", 0.5)
    first_taken.set()
    await asyncio.wait_for(ended.wait(), QUICK)
    with pytest.raises(PeerLost):
        async for _ in stream:
            pass


async def test_a_source_that_fails_cuts_the_stream_off(pair: Pair) -> None:
    alice, bob = pair
    inbox = Inbox(permits=100)
    bob.serve_push(inbox.take)

    async def source() -> AsyncIterator[Chunk]:
        async for chunk in chunks(3):
            yield chunk
        await inbox.started.wait()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await alice.push(bob.node, source())
    assert await asyncio.wait_for(inbox.outcome, QUICK) == f"lost {alice.node}"


async def test_a_cancelled_push_cuts_the_stream_off(pair: Pair) -> None:
    alice, bob = pair
    inbox = Inbox(permits=100)
    bob.serve_push(inbox.take)

    async def source() -> AsyncIterator[Chunk]:
        async for chunk in chunks(3):
            yield chunk
        await asyncio.Event().wait()

    push = asyncio.create_task(alice.push(bob.node, source()))
    await asyncio.wait_for(inbox.started.wait(), QUICK)
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    assert await asyncio.wait_for(inbox.outcome, QUICK) == f"lost {alice.node}"


async def test_a_stream_may_be_refused_on_the_way(pair: Pair) -> None:
    alice, bob = pair

    async def take(sender: str, stream: AsyncIterator[Chunk]) -> None:
        async for chunk in stream:
            if chunk.offset == 2:
                raise BadMessage("chunk 2 is not welcome")

    bob.serve_push(take)
    with pytest.raises(PeerRefused, match="chunk 2 is not welcome"):
        await alice.push(bob.node, chunks(200))


async def test_a_receiver_that_wants_less_refuses_the_rest(pair: Pair) -> None:
    alice, bob = pair

    async def take(sender: str, stream: AsyncIterator[Chunk]) -> None:
        await anext(stream)

    bob.serve_push(take)
    await alice.push(bob.node, chunks(1))
    with pytest.raises(PeerRefused, match="more chunks than were expected"):
        await alice.push(bob.node, chunks(3))


async def test_a_pull_may_be_refused(pair: Pair) -> None:
    alice, bob = pair

    async def give(sender: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        async for chunk in chunks(2):
            yield chunk
        raise BadMessage("no more")

    bob.serve_pull(give)
    stream = alice.pull(bob.node, FETCH)
    assert [(await anext(stream)).offset for _ in range(2)] == [0, 1]
    with pytest.raises(PeerRefused, match="no more"):
        await anext(stream)
