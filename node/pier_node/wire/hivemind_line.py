"""A line: a stream that stays open as long as the connection to a peer does, over which two nodes show their passports.

What comes on other streams of that connection's peer is the same node's: libp2p proves it. The end of a line tells at
once that a peer is gone; a ping on it every KEEPALIVE seconds keeps routers from forgetting it, and finds a peer whose
host lives while its process does not.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from pier.v1.stream_pb2 import Opening, Passport
from pier_node.wire.bounds import parse
from pier_node.wire.card import FROM, PROTOCOL_KEY, RUN, TO, Card, Headers
from pier_node.wire.carrier import BadMessage, PeerLost, PeerRefused
from pier_node.wire.hivemind_stream import CutOff, Kind, Stream

LINE = "Line"
"""The first frame of each stream names what it is for: this, or a method."""
NAME_BYTES = 64
OPENING_BYTES = 8192
KEEPALIVE = 20.0
"""Seconds between pings, and for the answer to each."""


def opening(card: Card, to: str | None, passport: Passport) -> Opening:
    """What a node says first to a node, or, with None, to whoever answers."""
    said = card.call(to)
    protocol, run = str(said[PROTOCOL_KEY]), str(said[RUN])
    passport = Passport(node=str(said[FROM]), certificate=passport.certificate, proof=passport.proof)
    return Opening(protocol=int(protocol), run_hash=bytes.fromhex(run), to=to or "", passport=passport)


def headers(opened: Opening) -> Headers:
    """The same, as a card judges it."""
    said: dict[str, str | bytes] = {
        PROTOCOL_KEY: str(opened.protocol),
        RUN: opened.run_hash.hex(),
        FROM: opened.passport.node,
    }
    return {**said, TO: opened.to} if opened.to else said


async def shown(stream: Stream, name: str) -> Passport:
    """The passport with which an opening was answered. Raises PeerLost of `name`, CutOff, BadMessage."""
    return parse(Passport, await answer(stream, name, OPENING_BYTES))


async def answer(stream: Stream, name: str, most: int) -> bytes:
    """The message that a peer sends next. Raises PeerLost of `name`, CutOff, BadMessage."""
    kind, body = await stream.receive(most)
    if kind in (Kind.REFUSED, Kind.FAILED):
        raise ending(kind, body, name)
    if kind is not Kind.MESSAGE:
        raise BadMessage(f"a frame of kind {kind.name} where a message belongs")
    return body


def ending(kind: Kind, reason: bytes, name: str) -> PeerLost:
    """The exception for a refusal or a failure that a peer told."""
    text = " ".join(reason.decode(errors="replace").split())
    readable = "".join(letter for letter in text if letter.isprintable())
    return (PeerRefused if kind is Kind.REFUSED else PeerLost)(name, readable)


async def held(stream: Stream) -> str:
    """Keep a line alive; returns why it ended."""
    try:
        while True:
            await stream.send(Kind.PING)
            async with asyncio.timeout(KEEPALIVE):
                await stream.receive(0)
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE):  # the end of a line is seen at once
                    await stream.receive(0)
    except TimeoutError:
        return "the connection went silent"
    except (CutOff, BadMessage):
        return "the connection was cut off"
