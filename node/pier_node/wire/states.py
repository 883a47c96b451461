"""The transfer of states: what describes one, the server that sends it, and the pieces of it that have arrived.

A manifest describes a state before it takes any memory, by the hashes of its pieces, and the state's digest is the hash
of those hashes: a site that knows the digest can take pieces from any peer. AdamW's moments are part of a state in
synchronous training only.

StateServer serves this node's states to peers that join, fell behind, or finish a round that others began. A described
state stays unchanged until nobody has fetched from it for a while, even though the node moves on: a held state is a
reference to memory that never changes. At most HELD states are held, so serving takes the memory of at most HELD
states, besides streams that outlive their state's place.

A Partial holds the pieces that have arrived. It outlives a failed transfer, and the next transfer continues where that
one stopped. A piece with a value that no training leads to is refused, whatever its hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.outer import state as states
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, Chunk
from pier_proto.v1.peer_pb2 import FetchRequest, Link, Manifest, StateRequest, Tensor

Hashes = Mapping[str, list[bytes]]

_KINDS = ({ANCHOR, MOMENTUM}, {ANCHOR, MOMENTUM, ADAM_M, ADAM_V})
"""The sets of tensors that a state may consist of."""
_OF_STAGE = (*_KINDS, {ANCHOR, ADAM_M, ADAM_V})
"""Those of a pipeline's stage."""

RUN = 16
"""Most pieces that one request asks for."""


@dataclass(frozen=True)
class Description:
    """A manifest that passed every check.

    Attributes:
        state: hashes of the tensors that `digest` covers.
        adam_step: number of AdamW steps that the moments are made of, if the state has any.
    """

    round: int
    members: tuple[str, ...]
    ledger: Mapping[str, int]
    digest: bytes
    state: Hashes
    adam_step: int

    def build(self, tensors: Mapping[str, SharedVector]) -> OuterState:
        """The described state, built from tensors whose pieces have the hashes in `state`."""
        step = self.adam_step if ADAM_M in tensors else 0
        state = OuterState(self.round, self.members, tensors, self.ledger, step)
        vars(state)["hashes"] = dict(self.state)  # fills the cached property: every piece was hashed on arrival
        return state


def describe(state: OuterState) -> Manifest:
    """The manifest of a state; hashes whatever was not hashed yet."""
    hashes, vectors = state.hashes, state.tensors
    return Manifest(
        round=state.round,
        digest=state.digest,
        members=state.members,
        ledger=state.ledger,
        piece_length=states.PIECE,
        tensors=[Tensor(name=name, length=len(vectors[name].array), hashes=hashes[name]) for name in hashes],
        adam_step=state.adam_step,
    )


def examine(manifest: Manifest, length: int, of_stage: bool = False) -> Description:
    """Check a manifest of vectors of `length` elements. Raises BadMessage, which says what is wrong.

    Args:
        of_stage: it is that of a pipeline's stage, and not of the run's state.
    """
    if manifest.piece_length != states.PIECE:
        raise BadMessage(f"its pieces have {manifest.piece_length} elements, ours {states.PIECE}")
    hashes = {tensor.name: _hashes_of(tensor, length) for tensor in manifest.tensors}
    names = set(hashes)
    if len(names) != len(manifest.tensors) or names not in (_OF_STAGE if of_stage else _KINDS):
        raise BadMessage(f"it lists the tensors {', '.join(tensor.name for tensor in manifest.tensors) or 'none'}")
    members, ledger = tuple(manifest.members), dict(manifest.ledger)
    state = {name: hashes[name] for name in sorted(names)}
    step = manifest.adam_step if ADAM_M in state else 0
    if states.state_digest(manifest.round, members, ledger, step, state) != manifest.digest:
        raise BadMessage("its digest is not that of the pieces it lists")
    return Description(manifest.round, members, ledger, manifest.digest, state, step)


def pieces(length: int) -> int:
    """Number of pieces in a vector of `length` elements."""
    return -(-length // states.PIECE)


def _hashes_of(tensor: Tensor, length: int) -> list[bytes]:
    if tensor.length != length:
        raise BadMessage(f"{tensor.name} has {tensor.length} elements, this run's model has {length}")
    if len(tensor.hashes) != pieces(length) or any(len(piece) != 32 for piece in tensor.hashes):
        raise BadMessage(f"{tensor.name} comes with {len(tensor.hashes)} hashes for {pieces(length)} pieces")
    return list(tensor.hashes)


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a tensor."""

    tensor: str
    start: int
    end: int


class Partial:
    """Vectors that arrive piece by piece from any number of peers. A piece is accepted only if its hash matches.

    Attributes:
        own: a state of this site, if it has one. Pieces that are wanted and part of it need not arrive.
    """

    def __init__(self, own: OuterState | None = None) -> None:
        self.own = own
        self._hashes: Hashes = {}
        self._length = 0
        self._looked_through: OuterState | None = None
        self._vectors: dict[str, SharedVector] = {}
        self._waiting: deque[Piece] = deque()
        self._flying: set[Piece] = set()
        self._arrived = 0
        self._changed = asyncio.Event()

    def aim(self, hashes: Hashes, length: int) -> None:
        """Set what is wanted: vectors of `length` elements with these hashes. Pieces of it that are here are kept."""
        if hashes == self._hashes and length == self._length and self.own is self._looked_through:
            return
        here, starts = self._here(), range(0, length, states.PIECE)
        self._looked_through = self.own
        self._hashes, self._length = hashes, length
        self._vectors = {name: SharedVector.scratch(length) for name in hashes}
        self._waiting, self._flying, self._arrived = deque(), set(), 0
        for name, of_tensor in hashes.items():
            for start, digest in zip(starts, of_tensor, strict=True):
                piece = Piece(name, start, min(start + states.PIECE, length))
                if (values := here.get(digest)) is None:
                    self._waiting.append(piece)
                else:
                    self._vectors[name].array[piece.start : piece.end] = values
                    self._arrived += piece.end - piece.start

    def _here(self) -> dict[bytes, Vector]:
        """By their hashes, the pieces of the own state, and those that have arrived of what was wanted before."""
        missing = {(piece.tensor, piece.start) for piece in (*self._waiting, *self._flying)}
        here: dict[bytes, Vector] = {}
        for name, hashes in self._hashes.items():
            for start, digest, values in _pieces_of(self._vectors[name].array, hashes):
                if (name, start) not in missing:
                    here[digest] = values
        if (own := self.own) is not None:
            for name, hashes in own.hashes.items():
                here |= {digest: values for _, digest, values in _pieces_of(own.tensors[name].array, hashes)}
        return here

    def take(self, peers: int) -> list[Piece]:
        """The next pieces to request from one of `peers` peers: neighbors in one tensor, fewer when few are left.

        Returns an empty list when all pieces are here or on their way.
        """
        run: list[Piece] = []
        most = max(1, min(RUN, len(self._waiting) // (2 * peers)))
        while self._waiting and len(run) < most:
            following = self._waiting[0]
            if run and (following.tensor, following.start) != (run[-1].tensor, run[-1].end):
                break
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
        _check_values(piece.tensor, values)
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


def _pieces_of(vector: Vector, hashes: Sequence[bytes]) -> Iterator[tuple[int, bytes, Vector]]:
    """First element, hash and values of each piece of a vector."""
    for index, digest in enumerate(hashes):
        start = index * states.PIECE
        yield start, digest, vector[start : start + states.PIECE]


def _check_values(tensor: str, values: Vector) -> None:
    """Refuse values, shape [n], n > 0, that no training leads to. Raises BadMessage."""
    least, most = values.min(), values.max()
    if not -math.inf < least <= most < math.inf:
        raise BadMessage(f"{tensor} has values that are not finite")
    if tensor == states.ADAM_V and least < 0:
        raise BadMessage(f"{tensor} has negative values, and is a mean of squares")


HELD = 2
"""Number of described states that are held at once; the least recently used one goes first."""
IDLE = 60.0
"""Seconds after its last use until a held state is released."""

Offer = Callable[[int, bool], OuterState | None]
"""The state of a round (0 for the newest) or, with True, the staged result of that round; None if it is not held."""
Prove = Callable[[int], list[Link]]
MeanOf = Callable[[int], Iterator[tuple[int, bytes]]]
"""The encoded mean of a round in chunks, each with its first element. Blocks. Raises BadMessage."""


@dataclass
class _Held:
    state: OuterState
    release: asyncio.TimerHandle | None = None


def no_proof(_round: int) -> list[Link]:
    """No proof: nobody votes for the stages of a pipeline; rounds decide which version of them counts."""
    return []


def no_mean(_round: int) -> Iterator[tuple[int, bytes]]:
    """No mean: there are none, or nobody asks for them."""
    raise BadMessage("no mean of that round is here")


class StateServer:
    """Answers Describe and Fetch on a carrier.

    Args:
        prove: proves the newest state to a site that trusts a round of it.
        mean: see rounds/means.py.
    """

    def __init__(
        self, carrier: Carrier, offer: Offer, prove: Prove = no_proof, mean: MeanOf = no_mean, idle: float = IDLE
    ) -> None:
        self._offer, self._prove, self._mean, self._idle = offer, prove, mean, idle
        self._held: dict[tuple[int, bool], _Held] = {}
        carrier.serve(DESCRIBE, self.describe)
        carrier.serve_pull(self.fetch)

    async def describe(self, _peer: str, request: StateRequest) -> Manifest:
        """The manifest of a state that the node offers. Raises BadMessage."""
        if request.proof_only:
            newest = self._offer(0, False)
            if newest is None:
                raise BadMessage("there is no state here yet")
            proof = self._prove(request.trusted - 1)
            return Manifest(round=newest.round, digest=newest.digest, members=newest.members, proof=proof)
        proof = [] if request.shadow or request.round else self._prove(request.trusted - 1)
        held = self._hold(request.round, request.shadow)
        if "hashes" not in vars(held.state):
            await asyncio.to_thread(lambda: held.state.hashes)
        manifest = describe(held.state)
        manifest.proof.extend(proof)
        return manifest

    async def fetch(self, _peer: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        """Stream a run of pieces of a state, or the mean of a round. Raises BadMessage."""
        if request.mean:
            chunks = self._mean(request.round)
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                yield Chunk(round=request.round, stage=Chunk.STAGE_GATHER, offset=chunk[0], data=chunk[1])
            return
        key = (request.round, request.shadow)
        held = self._held.get(key) or self._hold(*key)
        if held.state.round != request.round:
            raise BadMessage(f"round {request.round} is not held here any more")
        if request.tensor not in held.state.tensors:
            raise BadMessage(f"round {request.round} has no tensor {request.tensor!r} here")
        vector = held.state.tensors[request.tensor].array
        end = request.offset + request.length
        whole_pieces = request.offset % states.PIECE == 0 and (end % states.PIECE == 0 or end == len(vector))
        if not (whole_pieces and request.offset < end <= len(vector)):
            raise BadMessage(f"elements {request.offset} to {end} are not pieces of a vector of {len(vector)}")
        for start in range(request.offset, end, states.PIECE):
            self._touch(key, held)
            data = vector[start : min(start + states.PIECE, end)].data.cast("B")
            yield Chunk(round=request.round, stage=Chunk.STAGE_STATE, offset=start, data=data)

    def _hold(self, number: int, shadow: bool) -> _Held:
        """Hold what the node offers now, in place of what was held under that name before. Raises BadMessage."""
        state = self._offer(number, shadow)
        if state is None:
            kind = "staged result" if shadow else "state"
            raise BadMessage(f"the {kind} of round {number} is not held here")
        key = (state.round, shadow)
        held = self._held.get(key)
        if held is None or held.state is not state:
            self._drop(key)
            held = self._held[key] = _Held(state)
        self._touch(key, held)
        if len(self._held) > HELD:
            self._drop(next(iter(self._held)))
        return held

    def _touch(self, key: tuple[int, bool], held: _Held) -> None:
        if self._held.get(key) is not held:
            return  # released in the middle of a stream, which ends by itself
        self._drop(key)
        self._held[key] = held
        held.release = asyncio.get_running_loop().call_later(self._idle, self._drop, key)

    def _drop(self, key: tuple[int, bool]) -> None:
        held = self._held.pop(key, None)
        if held is not None and held.release is not None:
            held.release.cancel()
