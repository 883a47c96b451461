from __future__ import annotations

from collections.abc import Callable

import pytest
from wire.state_cases import PIECE, outer_state, vector

from pier_node.outer import state as states
from pier_node.wire.carrier import BadMessage
from pier_node.wire.manifest import Moments, describe, examine, pieces
from pier_proto.v1.peer_pb2 import Manifest, Tensor

LENGTH = 5 * PIECE + 1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "PIECE", PIECE)


def test_pieces_of_a_vector() -> None:
    assert [pieces(length) for length in (0, 1, PIECE, PIECE + 1)] == [0, 1, 1, 2]


def test_a_description_says_what_the_state_is() -> None:
    state = outer_state(LENGTH)
    described = examine(describe(state, None), LENGTH)
    assert (described.round, described.members, described.ledger) == (7, ("a", "b"), {"a": 300, "b": 2**40})
    assert described.digest == state.digest
    assert described.state == state.hashes
    assert described.moments == {}
    assert described.build(state.tensors) == state
    assert described.build(state.tensors).digest == state.digest


def test_moments_come_along_outside_the_digest() -> None:
    state, moments = outer_state(LENGTH), Moments(vector(LENGTH, 3), vector(LENGTH, 4), 50)
    described = examine(describe(state, moments), LENGTH)
    assert described.moments == moments.hashes
    assert (described.digest, described.adam_step) == (state.digest, 50)
    assert described.build(state.tensors).adam_step == 0


def test_moments_of_a_synchronous_run_are_inside_the_digest() -> None:
    state = outer_state(LENGTH, adam=True)
    described = examine(describe(state, None), LENGTH)
    assert (set(described.state), described.moments) == (set(state.tensors), {})
    assert described.build(state.tensors).adam_step == 9


def set_length(manifest: Manifest) -> None:
    manifest.tensors[0].length = 2**60


def set_all_lengths(manifest: Manifest) -> None:
    for tensor in manifest.tensors:
        tensor.length = LENGTH - 1


def drop_hash(manifest: Manifest) -> None:
    del manifest.tensors[0].hashes[-1]


def shorten_hash(manifest: Manifest) -> None:
    manifest.tensors[0].hashes[0] = b"short"


def change_hash(manifest: Manifest) -> None:
    manifest.tensors[1].hashes[0] = bytes(32)


def change_pieces(manifest: Manifest) -> None:
    manifest.piece_length = 1


def drop_tensor(manifest: Manifest) -> None:
    del manifest.tensors[0]


def repeat_tensor(manifest: Manifest) -> None:
    manifest.tensors.append(manifest.tensors[0])


def add_tensor(manifest: Manifest) -> None:
    manifest.tensors.append(Tensor(name="other", length=LENGTH, hashes=manifest.tensors[0].hashes))


def add_member(manifest: Manifest) -> None:
    manifest.members.append("c")


def change_ledger(manifest: Manifest) -> None:
    manifest.ledger["a"] = 0


def change_round(manifest: Manifest) -> None:
    manifest.round = 2**63


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (set_length, f"anchor has {2**60} elements"),
        (set_all_lengths, f"this run's model has {LENGTH}"),
        (drop_hash, "5 hashes for 6 pieces"),
        (shorten_hash, "6 hashes for 6 pieces"),
        (change_hash, "digest"),
        (change_pieces, f"pieces have 1 elements, ours {PIECE}"),
        (drop_tensor, "lists the tensors momentum"),
        (repeat_tensor, "lists the tensors anchor, momentum, anchor"),
        (add_tensor, "lists the tensors anchor, momentum, other"),
        (add_member, "digest"),
        (change_ledger, "digest"),
        (change_round, "digest"),
        (Manifest.Clear, "pieces have 0 elements"),
    ],
)
def test_a_bad_manifest_is_refused(spoil: Callable[[Manifest], None], complaint: str) -> None:
    manifest = describe(outer_state(LENGTH), None)
    spoil(manifest)
    with pytest.raises(BadMessage, match=complaint):
        examine(manifest, LENGTH)
