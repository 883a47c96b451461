"""StateServer: serves this node's states to peers that join, fell behind, or finish a round that others began.

A described state stays unchanged until nobody has fetched from it for a while, even though the node moves on: a held
state is a reference to memory that never changes. At most HELD states are held, so serving takes the memory of at most
HELD states, besides streams that outlive their state's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pier_node.base.shared import SharedVector
from pier_node.outer import state as states
from pier_node.outer.state import OuterState
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier
from pier_node.wire.chunk import Chunk
from pier_node.wire.manifest import describe
from pier_proto.v1.peer_pb2 import FetchRequest, Link, Manifest, StateRequest

HELD = 2
"""Number of described states that are held at once; the least recently used one goes first."""
IDLE = 60.0
"""Seconds after its last use until a held state is released."""

Offer = Callable[[int, bool], OuterState | None]
"""The state of a round (0 for the newest) or, with True, the staged result of that round; None if it is not held."""
Prove = Callable[[int], list[Link]]


@dataclass
class _Held:
    state: OuterState
    release: asyncio.TimerHandle | None = None

    def tensor(self, name: str) -> SharedVector:
        """One of the vectors. Raises BadMessage."""
        if name not in self.state.tensors:
            raise BadMessage(f"round {self.state.round} has no tensor {name!r} here")
        return self.state.tensors[name]


def no_proof(_round: int) -> list[Link]:
    """No proof: nobody votes for the stages of a pipeline; rounds decide which version of them counts."""
    return []


class StateServer:
    """Answers Describe and Fetch on a carrier; `prove` proves the newest state to a site that trusts a round of it."""

    def __init__(self, carrier: Carrier, offer: Offer, prove: Prove = no_proof, idle: float = IDLE) -> None:
        self._offer, self._prove, self._idle = offer, prove, idle
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
        """Stream a run of pieces of a state. Raises BadMessage."""
        key = (request.round, request.shadow)
        held = self._held.get(key) or self._hold(*key)
        if held.state.round != request.round:
            raise BadMessage(f"round {request.round} is not held here any more")
        vector = held.tensor(request.tensor).array
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
