"""Files that sites send: one at a time from each site. What has arrived stays when a transfer is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pier_coordinator.store.sites import Refused, TooFast
from pier_node.wire.files import Arriving

BUSY = 5.0
"""Seconds after which a site may ask again if one of its files seems to be on its way."""


class Inbox:
    """Files of one kind on their way to the coordinator, at most one from each site, complete or not.

    Args:
        folder: where they are until they are complete.
        kind: what they are called in refusals.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._coming: set[str] = set()

    def arrived(self, node: str, digest: str) -> int:
        """Number of bytes that are here of the file with this SHA-256 (hex) from this site."""
        here, size = Arriving(self._folder, node).here()
        return size if here == digest else 0

    @asynccontextmanager
    async def receive(
        self, node: str, size: int, digest: str, pieces: AsyncIterable[bytes], offset: int, seconds: float
    ) -> AsyncIterator[Path]:
        """Receive a file; yield its path there. At the end it is deleted, unless it was moved.

        Args:
            size, digest: of the whole file; the digest is its SHA-256, hex.
            pieces: its bytes without the first `offset` ones.
            seconds: maximum duration of the transfer.

        Raises:
            TooFast: this site is sending one already, as it seems: its connection may have broken unnoticed.
            Refused: the transfer takes too long, or the file cannot be written or kept.
            ValueError: the pieces are not those of that file.
        """
        if node in self._coming:
            raise TooFast(f"another {self._kind} of this site is on its way", BUSY)
        self._coming.add(node)
        arriving = Arriving(self._folder, node)
        try:
            async with asyncio.timeout(seconds):
                path = await arriving.receive(pieces, size, digest, offset)
            try:
                yield path
            finally:
                arriving.drop()
        except TimeoutError as error:
            raise Refused(f"the {self._kind} has taken longer than {seconds:.0f} s") from error
        except OSError as error:
            raise Refused(f"the coordinator cannot keep it: {error.strerror}") from error
        finally:
            self._coming.discard(node)
