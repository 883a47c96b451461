"""One libp2p stream, cut into frames: a header of five bytes, the length and the kind, then the body.

p2pd knows no half-closed streams: to close one end closes both. So whoever asked closes; what ends a stream, or refuses
it, is a frame of its own; and a stream that ends without one was cut off.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from enum import IntEnum

from pier_node.wire.carrier import BadMessage

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
