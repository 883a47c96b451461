"""A libp2p stream cut into frames, and the line: a stream that is open as long as the connection to a peer.

A frame has a header of five bytes (length and kind), then the body. p2pd has no half-closed streams: closing one end
closes both. So the asker closes the stream. A separate frame ends or refuses a stream, and a stream that ends without
one was cut off.

On a line, two nodes show their identity proofs. Other streams of that peer come from the same node: libp2p proves it.
The end of a line shows at once that a peer is gone. A ping every KEEPALIVE seconds keeps routers from forgetting the
line, and finds a peer whose host is alive while its process is not.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from enum import IntEnum

from pier_node.wire.carrier import KEEPALIVE, BadMessage, PeerLost, PeerRefused
from pier_node.wire.grpc.reasons import brief
from pier_node.wire.links import FROM, PROTOCOL_KEY, RUN, TO, CallMetadata, Headers
from pier_proto.v1.stream_pb2 import IdentityProof, Opening

_HEADER = struct.Struct(">IB")
REASON_BYTES = 4096
"""Longest reason of a refusal or a failure, in bytes."""


class Kind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 0
    END = 1
    """No more messages; as the answer to a stream, the stream was received completely."""
    REFUSED = 2
    """A refusal; the body says why."""
    FAILED = 3
    PING = 4
    """A ping on a line; the answer is another ping."""


class CutOff(Exception):
    """The stream ended too early."""


class Stream:
    """A stream, at either end.

    Args:
        reader, writer: of the socket through which p2pd carries the stream.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a frame; return once the stream has room for the next. Raises CutOff."""
        if self._writer.is_closing():
            raise CutOff
        self._writer.write(_HEADER.pack(len(body), kind))
        self._writer.write(body)
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise CutOff from error

    async def receive(self, most: int) -> tuple[Kind, bytes]:
        """The next frame, its body at most `most` bytes long. Raises CutOff and, before it takes memory, BadMessage."""
        try:
            length, number = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            limit = REASON_BYTES if number in (Kind.REFUSED, Kind.FAILED) else most
            if number not in set(Kind) or length > limit:
                raise BadMessage(f"a frame of kind {number} and {length} bytes is larger than max ({limit})")
            return Kind(number), await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CutOff from error

    async def gone(self) -> None:
        """Return once the other end has closed; drop whatever it still sends."""
        with suppress(ConnectionError):
            while await self._reader.read(1 << 16):
                pass

    def close(self) -> None:
        """Close both ends now: whatever waits for this stream raises CutOff."""
        self._writer.transport.abort()
        self._reader.feed_eof()


LINE = "Line"
"""The first frame of each stream names its purpose: this, or a method."""
NAME_BYTES = 64
OPENING_BYTES = 8192


def opening(metadata: CallMetadata, to: str | None, identity_proof: IdentityProof) -> Opening:
    """The first message to a node; None as the node means whichever node answers."""
    said = {key: str(value) for key, value in metadata.call(to).items()}
    shown = IdentityProof(node=said[FROM], certificate=identity_proof.certificate, proof=identity_proof.proof)
    run_hash = bytes.fromhex(said[RUN])
    return Opening(protocol=int(said[PROTOCOL_KEY]), run_hash=run_hash, to=to or "", identity_proof=shown)


def headers(opened: Opening) -> Headers:
    """The headers of an opening, as call metadata checks them."""
    said: dict[str, str | bytes] = {
        PROTOCOL_KEY: str(opened.protocol),
        RUN: opened.run_hash.hex(),
        FROM: opened.identity_proof.node,
    }
    return {**said, TO: opened.to} if opened.to else said


async def answer(stream: Stream, name: str, most: int) -> bytes:
    """The next message from a peer. Raises PeerLost of `name`, CutOff, BadMessage."""
    kind, body = await stream.receive(most)
    if kind in (Kind.REFUSED, Kind.FAILED):
        raise ending(kind, body, name)
    if kind is not Kind.MESSAGE:
        raise BadMessage(f"a frame of kind {kind.name} where a message belongs")
    return body


def ending(kind: Kind, reason: bytes, name: str) -> PeerLost:
    """The exception for a refusal or a failure that a peer reported."""
    return (PeerRefused if kind is Kind.REFUSED else PeerLost)(name, brief(reason.decode(errors="replace")))


async def held(stream: Stream) -> str:
    """Keep a line alive; return why it ended."""
    try:
        while True:
            await stream.send(Kind.PING)
            async with asyncio.timeout(KEEPALIVE):
                await stream.receive(0)
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE):  # the end of a line shows at once
                    await stream.receive(0)
    except TimeoutError:
        return "the connection went silent"
    except (CutOff, BadMessage):
        return "the connection was cut off"
