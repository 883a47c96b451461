"""OuterState: what every member of a round holds, bit for bit, and the digest that proves it.

A state never changes: a round stages the next one (the shadow), and a commit assigns a reference. So a state stays
whole as long as anything holds it, even while it is sent to a newcomer, saved, or loaded by workers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pier_node.base.shared import SharedVector, Vector

PIECE = 1 << 18
"""Elements in a hashed piece: 1 MiB of fp32."""

ANCHOR, MOMENTUM, ADAM_M, ADAM_V = "anchor", "momentum", "adam_m", "adam_v"

_hashers = ThreadPoolExecutor(2, thread_name_prefix="hash")


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
    def norm(self) -> float:
        """L2 norm of φ. As with `hashes` and `digest`, the first use takes as long as reading all of it."""
        return l2_norm(self.anchor)

    @cached_property
    def hashes(self) -> dict[str, list[bytes]]:
        """SHA-256 of each piece of each tensor."""
        return {name: piece_hashes(vector.array) for name, vector in self.tensors.items()}

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the whole state, through the hashes of its pieces."""
        return state_digest(self.round, self.members, self.ledger, self.adam_step, self.hashes)


def l2_norm(vector: Vector) -> float:
    """L2 norm: the square root of the sum of squares."""
    return float(np.sqrt(np.dot(vector, vector)))


def distance(one: Vector, other: Vector) -> float:
    """L2 norm of the difference of two vectors, shape [n] each, without a third vector in memory."""
    pieces = (slice(start, start + PIECE) for start in range(0, len(one), PIECE))
    return math.sqrt(sum(l2_norm(one[piece] - other[piece]) ** 2 for piece in pieces))


def piece_hashes(vector: Vector) -> list[bytes]:
    """SHA-256 of every PIECE elements of a vector."""
    if len(vector) <= PIECE:
        return [_sha256(piece) for piece in _pieces(vector)]
    return list(_hashers.map(_sha256, _pieces(vector)))


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


def _pieces(vector: Vector) -> Iterator[memoryview]:
    flat = memoryview(vector.view(np.uint8).data)
    return (flat[start : start + 4 * PIECE] for start in range(0, len(flat), 4 * PIECE))


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
