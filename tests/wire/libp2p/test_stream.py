from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.sites import MIB, QUICK

from pier_node.wire.carrier import BadMessage
from pier_node.wire.libp2p.stream import REASON_BYTES, CutOff, Kind, Stream

Ends = tuple[Stream, Stream]


async def ends_of(pair: tuple[socket.socket, socket.socket]) -> Ends:
    one, two = [Stream(*await asyncio.open_connection(sock=end)) for end in pair]
    return one, two


@pytest.fixture
async def ends() -> AsyncGenerator[Ends]:
    one, two = await ends_of(socket.socketpair())
    yield one, two
    one.close()
    two.close()


@pytest.fixture
async def raw() -> AsyncGenerator[tuple[asyncio.StreamWriter, Stream]]:
    """A writer of plain bytes, and the stream at the other end."""
    one, two = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=one)
    stream = Stream(*await asyncio.open_connection(sock=two))
    yield writer, stream
    writer.close()
    stream.close()


async def test_frames_arrive_as_they_were_sent(ends: Ends) -> None:
    sent = [(Kind.MESSAGE, bytes(MIB)), (Kind.MESSAGE, b""), (Kind.REFUSED, b"no"), (Kind.PING, b""), (Kind.END, b"")]

    async def send() -> None:
        for kind, body in sent:
            await ends[0].send(kind, body)

    sending = asyncio.create_task(send())
    assert [await ends[1].receive(MIB) for _ in sent] == sent
    await sending


async def test_a_receiver_that_does_not_read_holds_the_sender_back(ends: Ends) -> None:
    sending = asyncio.create_task(ends[0].send(Kind.MESSAGE, bytes(8 * MIB)))
    await asyncio.sleep(0)
    assert not sending.done()
    await ends[1].receive(8 * MIB)
    await asyncio.wait_for(sending, QUICK)


async def test_a_frame_that_is_too_long_is_refused_by_its_header(raw: tuple[asyncio.StreamWriter, Stream]) -> None:
    writer, stream = raw
    writer.write(struct.pack(">IB", 1001, Kind.MESSAGE))
    with pytest.raises(BadMessage, match=r"1001 bytes is larger than max \(1000\)"):
        await stream.receive(1000)


async def test_a_reason_may_be_longer_than_the_message_that_was_expected(ends: Ends) -> None:
    await ends[0].send(Kind.FAILED, bytes(REASON_BYTES))
    assert (await ends[1].receive(0))[0] is Kind.FAILED
    await ends[0].send(Kind.REFUSED, bytes(REASON_BYTES + 1))
    with pytest.raises(BadMessage):
        await ends[1].receive(MIB)


@pytest.mark.parametrize("part", range(9))
async def test_every_part_of_a_frame_is_a_stream_cut_off(raw: tuple[asyncio.StreamWriter, Stream], part: int) -> None:
    writer, stream = raw
    writer.write((struct.pack(">IB", 4, Kind.MESSAGE) + b"1234")[:part])
    writer.close()
    with pytest.raises(CutOff):
        await stream.receive(MIB)


async def test_closing_ends_whatever_waits(ends: Ends) -> None:
    waiting = [asyncio.create_task(ends[0].receive(0)), asyncio.create_task(ends[1].receive(0))]
    await asyncio.sleep(0)
    ends[0].close()
    for task in waiting:
        with pytest.raises(CutOff):
            await asyncio.wait_for(task, QUICK)
    with pytest.raises(CutOff):
        await ends[0].send(Kind.END)


async def test_what_still_comes_is_dropped_until_the_other_end_goes(ends: Ends) -> None:
    gone = asyncio.create_task(ends[1].gone())
    for _ in range(10):
        await ends[0].send(Kind.MESSAGE, bytes(MIB))
    assert not gone.done()
    ends[0].close()
    await asyncio.wait_for(gone, QUICK)


@given(st.binary(max_size=64))
def test_noise_is_refused_or_understood(noise: bytes) -> None:
    async def read() -> None:
        one, two = socket.socketpair()
        one.sendall(noise)
        one.close()
        stream = Stream(*await asyncio.open_connection(sock=two))
        try:
            while True:
                kind, body = await asyncio.wait_for(stream.receive(32), QUICK)
                assert kind in Kind
                assert len(body) <= REASON_BYTES
        except (BadMessage, CutOff):
            pass
        stream.close()

    asyncio.run(read())
