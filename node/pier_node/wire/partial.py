"""Partial: the pieces of some vectors that have arrived, those on their way, and those that nobody fetches yet.

A Partial outlives a failed transfer, and the next transfer continues where that one stopped. A piece with a value that
no training leads to is refused, whatever its hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.outer import state as states
from pier_node.wire.carrier import BadMessage
from pier_node.wire.manifest import Hashes, pieces
from pier_proto.v1.peer_pb2 import Chunk

RUN = 16
"""Most pieces that one request asks for."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a tensor."""

    tensor: str
    start: int
    end: int


class Partial:
    """Vectors that arrive piece by piece from any number of peers. A piece is accepted only if its hash matches."""

    def __init__(self) -> None:
        self._hashes: Hashes = {}
        self._length = 0
        self._vectors: dict[str, SharedVector] = {}
        self._waiting: deque[Piece] = deque()
        self._flying: set[Piece] = set()
        self._arrived = 0
        self._changed = asyncio.Event()

    def aim(self, hashes: Hashes, length: int) -> None:
        """Set what is wanted: vectors of `length` elements with these hashes. If that is unchanged, pieces are kept."""
        if hashes == self._hashes and length == self._length:
            return
        self._hashes, self._length = hashes, length
        self._vectors = {name: SharedVector.scratch(length) for name in hashes}
        self._waiting = deque(piece for name in hashes for piece in _pieces_of(name, length))
        self._flying = set()
        self._arrived = 0

    def take(self, peers: int) -> list[Piece]:
        """The next pieces to request from one of `peers` peers: neighbors in one tensor, fewer when few are left.

        Returns an empty list when all pieces are here or on their way.
        """
        run: list[Piece] = []
        most = max(1, min(RUN, len(self._waiting) // (2 * peers)))
        while self._waiting and len(run) < most and (not run or _follows(run[-1], self._waiting[0])):
            run.append(self._waiting.popleft())
        self._flying.update(run)
        return run

    async def settle(self) -> bool:
        """Wait; return True when there are pieces to take, False when every piece is here."""
        while not self._waiting and self._flying:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._waiting)

    def accept(self, piece: Piece, chunk: Chunk) -> None:
        """Put a piece in its place. Raises BadMessage for another piece, a wrong hash or an absurd value."""
        digest = self._hashes[piece.tensor][piece.start // states.PIECE]
        if chunk.offset != piece.start or hashlib.sha256(chunk.data).digest() != digest:
            raise BadMessage(f"{piece.tensor} from element {piece.start} on is not what its hash says")
        values = np.frombuffer(chunk.data, np.float32)
        check_values(piece.tensor, values)
        self._vectors[piece.tensor].array[piece.start : piece.end] = values
        self._flying.remove(piece)
        self._arrived += piece.end - piece.start
        self._changed.set()

    def put_back(self, run: list[Piece]) -> None:
        """Let other peers fetch what did not arrive of a run."""
        rest = [piece for piece in run if piece in self._flying]
        self._flying.difference_update(rest)
        self._waiting.extendleft(reversed(rest))
        self._changed.set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that are here, and bytes in all."""
        return 4 * self._arrived, 4 * len(self._vectors) * self._length

    @property
    def complete(self) -> bool:
        """Whether every piece is here."""
        return not self._waiting and not self._flying

    def hand_over(self) -> dict[str, SharedVector]:
        """The complete vectors by name; this object keeps nothing of them."""
        assert self.complete
        vectors, self._vectors, self._hashes = self._vectors, {}, {}
        return vectors


def check_values(tensor: str, values: Vector) -> None:
    """Refuse values, shape [n], n > 0, that no training leads to. Raises BadMessage."""
    least, most = values.min(), values.max()
    if not -math.inf < least <= most < math.inf:
        raise BadMessage(f"{tensor} has values that are not finite")
    if tensor == states.ADAM_V and least < 0:
        raise BadMessage(f"{tensor} has negative values, and is a mean of squares")


def _pieces_of(tensor: str, length: int) -> Iterator[Piece]:
    for index in range(pieces(length)):
        start = index * states.PIECE
        yield Piece(tensor, start, min(start + states.PIECE, length))


def _follows(one: Piece, other: Piece) -> bool:
    return one.tensor == other.tensor and one.end == other.start
