"""OuterState: what every member of a round holds, bit for bit, and the digest that proves it.

A state never changes: a round stages the next one (the shadow), and a commit assigns a reference. So a state stays
whole as long as anything holds it, even while it is sent to a newcomer, saved, or loaded by workers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Self, TypeVar

import numpy as np

from pier_node.base.shared import SharedVector, Vector

PIECE = 1 << 18
"""Elements in a hashed piece: 1 MiB of fp32."""

ANCHOR, MOMENTUM, ADAM_M, ADAM_V = "anchor", "momentum", "adam_m", "adam_v"

T = TypeVar("T")

THREADS = min(len(os.sched_getaffinity(0)), 16)
RUNS = 4
"""How many runs of pieces a thread gets one by one, so that all of them end at about the same time."""

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pieces")


def in_pieces(work: Callable[[slice], T], length: int) -> list[T]:
    """Do some work on every PIECE elements of vectors of this length, in several threads. Results are in order.

    A piece stays in the cache while several things are done with it. The work must not call this function again.
    """
    pieces = [slice(start, min(start + PIECE, length)) for start in range(0, length, PIECE)]
    size = max(1, len(pieces) // (RUNS * THREADS))
    runs = [pieces[first : first + size] for first in range(0, len(pieces), size)]
    results = (map if len(runs) < 2 else _threads.map)(lambda run: [*map(work, run)], runs)
    return [*chain.from_iterable(results)]


class Piece(NamedTuple):
    """What is known of PIECE elements of a vector: their SHA-256, and the sum of their squares."""

    hash: bytes
    squares: float

    @classmethod
    def of(cls, values: Vector) -> Self:
        """Measure the elements of one piece."""
        with np.errstate(over="ignore", invalid="ignore"):  # see OuterState.finite
            return cls(hashlib.sha256(values.view(np.uint8).data).digest(), float(np.dot(values, values)))


@dataclass(frozen=True)
class OuterState:
    """The state after a committed (or staged) round.

    Attributes:
        round: number of the round; 0 is the start of the run.
        members: node ids of the group that made it, sorted; the next group must hold a majority of them.
        tensors: `anchor` φ and `momentum` M, fp32, shape [parameters], in canonical order; under synchronous training
            also AdamW's `adam_m` and `adam_v`, because there every site holds the same ones.
        ledger: tokens of each site that are in the anchor; it tells a site that was cut off whether its last update got
            in.
        adam_step: number of AdamW steps that `adam_m` and `adam_v` are made of; 0 if they are not here.
    """

    round: int
    members: tuple[str, ...]
    tensors: Mapping[str, SharedVector]
    ledger: Mapping[str, int]
    adam_step: int = 0

    @property
    def anchor(self) -> Vector:
        """φ, shape [parameters]."""
        return self.tensors[ANCHOR].array

    @property
    def momentum(self) -> Vector:
        """M, shape [parameters]."""
        return self.tensors[MOMENTUM].array

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """What is known of each piece of each tensor. The first use takes as long as reading all of them."""
        return {name: measured(vector.array) for name, vector in self.tensors.items()}

    def piece(self, name: str, start: int) -> Piece:
        """What is known of the piece that begins with this element of a tensor."""
        return self.pieces[name][start // PIECE]

    def knowing(self, pieces: dict[str, list[Piece]]) -> Self:
        """This state, whose pieces were measured while they were made."""
        vars(self)["pieces"] = pieces
        return self

    @cached_property
    def norm(self) -> float:
        """L2 norm of φ."""
        return math.sqrt(math.fsum(piece.squares for piece in self.pieces[ANCHOR]))

    @property
    def finite(self) -> bool:
        """Whether no tensor has a NaN or an infinity, or a number whose square is infinite."""
        return all(math.isfinite(piece.squares) for pieces in self.pieces.values() for piece in pieces)

    @cached_property
    def hashes(self) -> dict[str, list[bytes]]:
        """SHA-256 of each piece of each tensor."""
        return {name: [piece.hash for piece in pieces] for name, pieces in self.pieces.items()}

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the whole state, through the hashes of its pieces."""
        return state_digest(self.round, self.members, self.ledger, self.adam_step, self.hashes)


def l2_norm(vector: Vector) -> float:
    """L2 norm: the square root of the sum of squares."""
    return float(np.sqrt(np.dot(vector, vector)))


def distance(one: Vector, other: Vector) -> float:
    """L2 norm of the difference of two vectors, shape [n] each, without a third vector in memory."""
    return math.sqrt(math.fsum(in_pieces(lambda piece: l2_norm(one[piece] - other[piece]) ** 2, len(one))))


def measured(vector: Vector) -> list[Piece]:
    """What is known of every PIECE elements of a vector."""
    return in_pieces(lambda piece: Piece.of(vector[piece]), len(vector))


def piece_hashes(vector: Vector) -> list[bytes]:
    """SHA-256 of every PIECE elements of a vector."""
    return [piece.hash for piece in measured(vector)]


def state_digest(
    number: int,
    members: Sequence[str],
    ledger: Mapping[str, int],
    adam_step: int,
    hashes: Mapping[str, Sequence[bytes]],
) -> bytes:
    """Digest of a state from its description, with which a receiver checks a manifest before it fetches any data."""
    head = json.dumps([number, list(members), sorted(ledger.items()), adam_step])
    digest = hashlib.sha256(head.encode())
    for name in sorted(hashes):
        digest.update(f"\n{name} {len(hashes[name])}\n".encode())
        digest.update(b"".join(hashes[name]))
    return digest.digest()
