from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from simulation.virtual_time import run
from wire.sites import ALICE, BOB, QUICK, RUN

from pier_node.wire.carrier import KEEPALIVE, PROTOCOL, BadMessage, PeerLost, PeerRefused
from pier_node.wire.libp2p.stream import Kind, Stream, answer, ending, headers, held, opening
from pier_node.wire.links import FROM, PROTOCOL_KEY, TO, CallMetadata
from pier_node.wire.links import RUN as RUN_KEY
from pier_proto.v1.stream_pb2 import IdentityProof


async def line() -> tuple[Stream, Stream]:
    one, two = [Stream(*await asyncio.open_connection(sock=end)) for end in socket.socketpair()]
    return one, two


@pytest.mark.parametrize("to", [BOB.node, None])
def test_an_opening_says_what_a_card_does(to: str | None) -> None:
    said = headers(opening(CallMetadata(ALICE.node, RUN), to, IdentityProof(certificate=b"c", proof=b"p")))
    expected = {PROTOCOL_KEY: str(PROTOCOL), RUN_KEY: RUN.hex(), FROM: ALICE.node}
    assert said == ({**expected, TO: to} if to else expected)
    assert CallMetadata(BOB.node, RUN).admit("Leave", said, None) == ALICE.node


async def test_an_answer_is_a_message_or_an_exception() -> None:
    one, two = await line()
    await one.send(Kind.MESSAGE, b"yes")
    assert await answer(two, BOB.node, 10) == b"yes"
    await one.send(Kind.REFUSED, b"no\x1b[2J\nnever")
    with pytest.raises(PeerRefused, match=r"no \[2J never"):
        await answer(two, BOB.node, 10)
    await one.send(Kind.FAILED, b"oh")
    with pytest.raises(PeerLost, match=f"{BOB.node}: oh") as error:
        await answer(two, BOB.node, 10)
    assert not isinstance(error.value, PeerRefused)
    await one.send(Kind.END)
    with pytest.raises(BadMessage, match="a frame of kind END"):
        await answer(two, BOB.node, 10)
    one.close()
    two.close()


def test_what_is_no_text_is_shown_all_the_same() -> None:
    assert ending(Kind.FAILED, b"\xff\xfe", BOB.node).reason == "��"


class Sending:
    """Writes to a reader of this process."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.write = reader.feed_data

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None:
        pass


def test_it_is_held_as_long_as_pings_are_answered() -> None:
    async def main() -> None:
        here, there = asyncio.StreamReader(), asyncio.StreamReader()
        ends: Any = (here, Sending(there)), (there, Sending(here))
        one, two = (Stream(*end) for end in ends)
        holding = asyncio.create_task(held(one))
        for _ in range(3):
            assert await two.receive(0) == (Kind.PING, b"")
            await two.send(Kind.PING)
        assert not holding.done()
        assert await holding == "the connection went silent"
        assert asyncio.get_running_loop().time() == pytest.approx(4 * KEEPALIVE)

    run(main())


async def test_its_end_is_seen_at_once() -> None:
    one, two = await line()
    holding = asyncio.create_task(held(one))
    await two.receive(0)
    await two.send(Kind.PING)
    two.close()
    assert await asyncio.wait_for(holding, QUICK) == "the connection was cut off"
    one.close()
