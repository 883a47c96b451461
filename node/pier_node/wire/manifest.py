"""Manifests: descriptions of a state, sent and checked before the state itself takes any memory.

A state is described by the hashes of its pieces, and its digest is the hash of those hashes: a site that knows the
digest can take pieces from any peer. AdamW's moments differ between sites. So they may be sent along, but the digest
covers them only if they are part of the state (synchronous training).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pier_node.base.shared import SharedVector
from pier_node.outer import state as states
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Manifest, Tensor

Hashes = Mapping[str, list[bytes]]

_OUTER = {ANCHOR, MOMENTUM}
_MOMENTS = {ADAM_M, ADAM_V}
_KINDS = (_OUTER, _OUTER | _MOMENTS, {ANCHOR} | _MOMENTS)
"""The sets of tensors that a state may consist of; the last is that of a pipeline stage."""


@dataclass(frozen=True)
class Moments:
    """A copy of one site's AdamW moments, shape [parameters] each, after `step` steps."""

    adam_m: SharedVector
    adam_v: SharedVector
    step: int

    @property
    def tensors(self) -> dict[str, SharedVector]:
        """The moments by their names in a manifest."""
        return {ADAM_M: self.adam_m, ADAM_V: self.adam_v}

    @cached_property
    def hashes(self) -> dict[str, list[bytes]]:
        """SHA-256 of each piece of each tensor."""
        return {name: states.piece_hashes(vector.array) for name, vector in self.tensors.items()}


@dataclass(frozen=True)
class Description:
    """A manifest that passed every check.

    Attributes:
        state: hashes of the tensors that `digest` covers.
        moments: hashes of the describing site's own moments, which `digest` does not cover; empty if it sends none.
        adam_step: number of AdamW steps that the moments are made of, in either place.
    """

    round: int
    members: tuple[str, ...]
    ledger: Mapping[str, int]
    digest: bytes
    state: Hashes
    moments: Hashes
    adam_step: int

    def build(self, tensors: Mapping[str, SharedVector]) -> OuterState:
        """The described state, built from tensors whose pieces have the hashes in `state`."""
        step = self.adam_step if ADAM_M in tensors else 0
        state = OuterState(self.round, self.members, tensors, self.ledger, step)
        vars(state)["hashes"] = dict(self.state)  # fills the cached property: every piece was hashed on arrival
        return state


def describe(state: OuterState, moments: Moments | None) -> Manifest:
    """The manifest of a state; hashes whatever was not hashed yet."""
    hashes = {**(moments.hashes if moments else {}), **state.hashes}
    return Manifest(
        round=state.round,
        digest=state.digest,
        members=state.members,
        ledger=state.ledger,
        piece_length=states.PIECE,
        tensors=[Tensor(name=name, length=_length(name, state, moments), hashes=hashes[name]) for name in hashes],
        adam_step=moments.step if moments else state.adam_step,
    )


def examine(manifest: Manifest, length: int) -> Description:
    """Check a manifest of vectors of `length` elements. Raises BadMessage, which says what is wrong."""
    if manifest.piece_length != states.PIECE:
        raise BadMessage(f"its pieces have {manifest.piece_length} elements, ours {states.PIECE}")
    hashes = {tensor.name: _hashes_of(tensor, length) for tensor in manifest.tensors}
    names = set(hashes)
    if len(names) != len(manifest.tensors) or names not in _KINDS:
        raise BadMessage(f"it lists the tensors {', '.join(tensor.name for tensor in manifest.tensors) or 'none'}")
    members, ledger = tuple(manifest.members), dict(manifest.ledger)
    for covered in (names, names - _MOMENTS):
        state = {name: hashes[name] for name in sorted(covered)}
        moments = {name: hashes[name] for name in sorted(names - covered)}
        step = manifest.adam_step if ADAM_M in state else 0
        if states.state_digest(manifest.round, members, ledger, step, state) == manifest.digest:
            return Description(manifest.round, members, ledger, manifest.digest, state, moments, manifest.adam_step)
    raise BadMessage("its digest is not that of the pieces it lists")


def pieces(length: int) -> int:
    """Number of pieces in a vector of `length` elements."""
    return -(-length // states.PIECE)


def _length(name: str, state: OuterState, moments: Moments | None) -> int:
    owner = state.tensors if name in state.tensors or moments is None else moments.tensors
    return len(owner[name].array)


def _hashes_of(tensor: Tensor, length: int) -> list[bytes]:
    if tensor.length != length:
        raise BadMessage(f"{tensor.name} has {tensor.length} elements, this run's model has {length}")
    if len(tensor.hashes) != pieces(length) or any(len(piece) != 32 for piece in tensor.hashes):
        raise BadMessage(f"{tensor.name} comes with {len(tensor.hashes)} hashes for {pieces(length)} pieces")
    return list(tensor.hashes)
