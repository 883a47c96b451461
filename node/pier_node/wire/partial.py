"""Partial: what has arrived of some vectors, what is on its way, and what nobody fetches yet.

It outlives a failed transfer, and the next one goes on where that stopped. Whatever its hash says, no piece is accepted
with a value in it that no training leads to.
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
"""Pieces that one request asks for at most."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a tensor."""

    tensor: str
    start: int
    end: int


class Partial:
    """Vectors on their way here, piece by piece, from any number of peers. Pieces are accepted by their hash only."""

    def __init__(self) -> None:
        self._hashes: Hashes = {}
        self._length = 0
        self._vectors: dict[str, SharedVector] = {}
        self._waiting: deque[Piece] = deque()
        self._flying: set[Piece] = set()
        self._arrived = 0
        self._changed = asyncio.Event()

    def aim(self, hashes: Hashes, length: int) -> None:
        """Say what is wanted: vectors of `length` elements with these hashes. What was there stays if it is that."""
        if hashes == self._hashes and length == self._length:
            return
        self._hashes, self._length = hashes, length
        self._vectors = {name: SharedVector.scratch(length) for name in hashes}
        self._waiting = deque(piece for name in hashes for piece in _pieces_of(name, length))
        self._flying = set()
        self._arrived = 0

    def take(self, peers: int) -> list[Piece]:
        """The next pieces to ask one of `peers` peers for: neighbours in one tensor, fewer when few are left.

        Returns nothing when all pieces are here or on their way.
        """
        run: list[Piece] = []
        most = max(1, min(RUN, len(self._waiting) // (2 * peers)))
        while self._waiting and len(run) < most and (not run or _follows(run[-1], self._waiting[0])):
            run.append(self._waiting.popleft())
        self._flying.update(run)
        return run

    async def settle(self) -> bool:
        """Wait until there are pieces to take: True; or until every piece is here: False."""
        while not self._waiting and self._flying:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._waiting)

    def accept(self, piece: Piece, chunk: Chunk) -> None:
        """Put a piece into its place. Raises BadMessage: it is another one, its hash is wrong, or a value is absurd."""
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
        """Let others fetch what did not arrive of a run."""
        rest = [piece for piece in run if piece in self._flying]
        self._flying.difference_update(rest)
        self._waiting.extendleft(reversed(rest))
        self._changed.set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that are here, bytes in all."""
        return 4 * self._arrived, 4 * len(self._vectors) * self._length

    @property
    def complete(self) -> bool:
        """Every piece is here."""
        return not self._waiting and not self._flying

    def hand_over(self) -> dict[str, SharedVector]:
        """The complete vectors by name; keeps nothing."""
        assert self.complete
        vectors, self._vectors, self._hashes = self._vectors, {}, {}
        return vectors


def check_values(tensor: str, values: Vector) -> None:
    """Refuse what no training leads to, shape [n], n > 0. Raises BadMessage."""
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
