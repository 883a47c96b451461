"""Files on their way to or from the coordinator: score sheets and experts' checkpoints, in pieces of one size.

The sender of a file first says how large it is and what its SHA-256 is; anything else is refused. What has arrived of a
file stays on disk if its transfer is interrupted, and the next transfer continues there. The hash is always checked
over the whole file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from hashlib import _Hash

PIECE = 128 << 10
"""Maximum number of bytes of a file in one message."""
PART = ".part"
"""Ending of the name of a file that has not arrived completely."""


async def size_and_digest(file: BufferedReader) -> tuple[int, bytes]:
    """Size in bytes and SHA-256 of a whole file. Raises OSError."""
    file.seek(0)
    digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
    return file.tell(), digest.digest()


async def pieces_of(file: BufferedReader | BytesIO, offset: int) -> AsyncIterator[bytes]:
    """A file in pieces, without its first `offset` bytes. Raises OSError."""
    file.seek(offset)
    while piece := await asyncio.to_thread(file.read, PIECE):
        yield piece


class Arriving:
    """A file that arrives from one sender, in as many transfers as it takes; one file at a time.

    Args:
        folder: where it is kept until it is complete.
        sender: begins the file's name there; no other sender's name begins with it.
    """

    def __init__(self, folder: Path, sender: str) -> None:
        self._folder, self._sender = folder, sender

    def here(self) -> tuple[str, int]:
        """SHA-256 (hex) of the file of which a part is here, and the size of the part in bytes; ("", 0): nothing is."""
        for path in self._paths():
            with suppress(OSError):
                return path.stem.removeprefix(f"{self._sender}-"), path.stat().st_size
        return "", 0

    async def receive(self, pieces: AsyncIterable[bytes], size: int, digest: str, offset: int) -> Path:
        """Write the pieces of a file, after the `offset` bytes that are here. Returns its path once it is complete.

        What has arrived stays here if the pieces end too early, or with an error.

        Args:
            size: of the whole file, in bytes.
            digest: SHA-256 of the whole file, hex.

        Raises:
            ValueError: the pieces are not those of that file.
            OSError: the file cannot be written.
        """
        path = self._folder / f"{self._sender}-{digest}{PART}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.drop(but=path)
        try:
            with path.open("a+b") as file:
                found = await asyncio.to_thread(_cut, file, offset)
                came = await _append(pieces, file, found, offset, size)
        except (ValueError, OSError):
            self.drop()
            raise
        if came < size or found.hexdigest() != digest:
            if came == size:
                self.drop()
            raise ValueError(f"its hash is not that of the {came} bytes that came")
        return path

    def drop(self, but: Path | None = None) -> None:
        """Delete what is here, but for one file."""
        for path in self._paths():
            if path != but:
                with suppress(OSError):  # the disk is failing: what it has is not used
                    path.unlink()

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._sender}-*{PART}"))


def _cut(file: BinaryIO, offset: int) -> _Hash:
    """Keep the first `offset` bytes of a file and return their SHA-256. Raises ValueError if there are fewer."""
    if (here := file.seek(0, 2)) < offset:
        raise ValueError(f"it continues at byte {offset}, and {here} bytes are here")
    file.truncate(offset)
    file.seek(0)
    return hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]


async def _append(pieces: AsyncIterable[bytes], file: BinaryIO, found: _Hash, offset: int, size: int) -> int:
    """Write pieces at the end of a file of `offset` bytes and hash them. Returns the file's size. Raises ValueError."""
    came = offset
    async for piece in pieces:
        came += len(piece)
        if came > size:
            raise ValueError(f"more than the {size} bytes that it was to have")
        found.update(piece)
        await asyncio.to_thread(file.write, piece)
    return came
