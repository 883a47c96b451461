"""Files on their way to or from the coordinator: score sheets and experts' checkpoints, in pieces of one size.

Who sends a file says first how large it is and what its SHA-256 is. Whatever differs from that is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable, AsyncIterator
from io import BufferedReader, BytesIO
from typing import BinaryIO

PIECE = 128 << 10
"""Maximum number of bytes of a file in one message."""


async def size_and_digest(file: BufferedReader | BytesIO) -> tuple[int, bytes]:
    """Size in bytes and SHA-256 of a whole file, which is then at its beginning. Raises OSError."""
    file.seek(0)
    digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
    size = file.tell()
    file.seek(0)
    return size, digest.digest()


async def pieces_of(file: BufferedReader | BytesIO) -> AsyncIterator[bytes]:
    """The rest of a file in pieces. Raises OSError."""
    while piece := await asyncio.to_thread(file.read, PIECE):
        yield piece


async def receive(pieces: AsyncIterable[bytes], file: BinaryIO, size: int, digest: bytes) -> None:
    """Write the pieces of a file of which the sender has said the size, in bytes, and the SHA-256.

    Raises:
        ValueError: they are not those of that file.
        OSError: the file cannot be written.
    """
    came, found = 0, hashlib.sha256()
    async for piece in pieces:
        came += len(piece)
        if came > size:
            raise ValueError(f"more than the {size} bytes that it was to have")
        found.update(piece)
        await asyncio.to_thread(file.write, piece)
    if came != size or found.digest() != digest:
        raise ValueError(f"its hash is not that of the {came} bytes that came")
