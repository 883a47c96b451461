"""One libp2p stream, cut into frames: a header of five bytes, the length and the kind, then the body.

p2pd knows no half-closed streams: to close one end closes both. So whoever asked closes; what ends a stream, or refuses
it, is a frame of its own; and a stream that ends without one was cut off.

A line: a stream that stays open as long as the connection to a peer does, over which
two nodes show their identity proofs.

What comes on other streams of that connection's peer is the same node's: libp2p proves it. The end of a line tells at
once that a peer is gone; a ping on it every KEEPALIVE seconds keeps routers from forgetting it, and finds a peer whose
host lives while its process does not.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from enum import IntEnum

from pier_node.wire.bounds import parse
from pier_node.wire.carrier import BadMessage, PeerLost, PeerRefused
from pier_node.wire.metadata import FROM, PROTOCOL_KEY, RUN, TO, CallMetadata, Headers
from pier_proto.v1.stream_pb2 import IdentityProof, Opening

_HEADER = struct.Struct(">IB")
REASON_BYTES = 4096
"""Longest reason of a refusal or a failure."""


class Kind(IntEnum):
    """What a frame is."""

    MESSAGE = 0
    END = 1
    """No more messages; as an answer to a stream: it was taken whole."""
    REFUSED = 2
    """The body says why."""
    FAILED = 3
    PING = 4
    """On a line: answered with the same."""


class CutOff(Exception):
    """The stream ended before it should."""


class Stream:
    """A stream, at either end.

    Args:
        reader, writer: of the socket through which p2pd carries it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a frame; returns when the stream has room for the next. Raises CutOff."""
        if self._writer.is_closing():
            raise CutOff
        self._writer.write(_HEADER.pack(len(body), kind))
        self._writer.write(body)
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise CutOff from error

    async def receive(self, most: int) -> tuple[Kind, bytes]:
        """The next frame; its body has at most `most` bytes. Raises CutOff and, before it takes memory, BadMessage."""
        try:
            length, number = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            limit = REASON_BYTES if number in (Kind.REFUSED, Kind.FAILED) else most
            if number not in set(Kind) or length > limit:
                raise BadMessage(f"a frame of kind {number} and {length} bytes is larger than max ({limit})")
            return Kind(number), await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CutOff from error

    async def gone(self) -> None:
        """Return when the other end has closed; whatever it still sends is dropped."""
        with suppress(ConnectionError):
            while await self._reader.read(1 << 16):
                pass

    def close(self) -> None:
        """Close both ends, now: what waits for this stream raises CutOff."""
        self._writer.transport.abort()
        self._reader.feed_eof()

    def finish(self) -> None:
        """Close both ends once all was sent."""
        self._writer.close()


LINE = "Line"
"""The first frame of each stream names what it is for: this, or a method."""
NAME_BYTES = 64
OPENING_BYTES = 8192
KEEPALIVE = 20.0
"""Seconds between pings, and for the answer to each."""


def opening(metadata: CallMetadata, to: str | None, identity_proof: IdentityProof) -> Opening:
    """What a node says first to a node, or, with None, to whoever answers."""
    said = metadata.call(to)
    protocol, run = str(said[PROTOCOL_KEY]), str(said[RUN])
    identity_proof = IdentityProof(
        node=str(said[FROM]), certificate=identity_proof.certificate, proof=identity_proof.proof
    )
    return Opening(protocol=int(protocol), run_hash=bytes.fromhex(run), to=to or "", identity_proof=identity_proof)


def headers(opened: Opening) -> Headers:
    """The same, as a metadata judges it."""
    said: dict[str, str | bytes] = {
        PROTOCOL_KEY: str(opened.protocol),
        RUN: opened.run_hash.hex(),
        FROM: opened.identity_proof.node,
    }
    return {**said, TO: opened.to} if opened.to else said


async def shown(stream: Stream, name: str) -> IdentityProof:
    """The identity proof with which an opening was answered. Raises PeerLost of `name`, CutOff, BadMessage."""
    return parse(IdentityProof, await answer(stream, name, OPENING_BYTES))


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
