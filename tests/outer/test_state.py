from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from rounds.cases import LENGTH, outer_state, shared

from pier_node.base.shared import SharedVector
from pier_node.outer import state as states
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState, piece_hashes, state_digest


def example() -> OuterState:
    tensors = {ANCHOR: shared([1.0, -2.0]), MOMENTUM: shared([0.5, 0.25])}
    return OuterState(3, ("a", "b"), tensors, {"a": 10, "b": 20})


def test_golden_digest() -> None:
    digest = "6fa448d5b046f6fce410eb5021f2230f5bc1d297c59c3e7281e95c50b8a67eaa"
    assert example().digest.hex() == digest, "a change here forks a run between versions: raise the protocol's number"


def test_the_digest_is_the_hash_of_the_head_and_of_the_hashes_of_the_pieces() -> None:
    state = example()
    expected = hashlib.sha256(json.dumps([3, ["a", "b"], [["a", 10], ["b", 20]], 0]).encode())
    for name in (ANCHOR, MOMENTUM):
        expected.update(f"\n{name} 1\n".encode() + hashlib.sha256(state.tensors[name].array.tobytes()).digest())
    assert state.digest == expected.digest()


def test_names() -> None:
    state = example()
    assert state.anchor.tolist() == [1, -2]
    assert state.momentum.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    "change",
    [
        {"round": 4},
        {"members": ("a", "c")},
        {"members": ("a",)},
        {"ledger": {"a": 10, "b": 21}},
        {"ledger": {"a": 10}},
        {"adam_step": 1},
        {"tensors": {ANCHOR: shared([1.0, -2.0])}},
        {"tensors": {ANCHOR: shared([0.5, 0.25]), MOMENTUM: shared([1.0, -2.0])}},
        {"tensors": {ANCHOR: shared([1.0, 2.0]), MOMENTUM: shared([0.5, 0.25])}},
    ],
)
def test_every_part_of_a_state_changes_its_digest(change: dict[str, object]) -> None:
    assert replace(example(), **change).digest != example().digest  # type: ignore[arg-type]


def test_the_order_of_the_ledger_does_not() -> None:
    assert replace(example(), ledger={"b": 20, "a": 10}).digest == example().digest


def test_even_the_sign_of_a_zero_changes_it() -> None:
    assert outer_state("a", anchor=[0.0]).digest != outer_state("a", anchor=[-0.0]).digest


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
def test_pieces(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(states, "PIECE", 8)
    vector = np.arange(length, dtype=np.float32)
    expected = [hashlib.sha256(vector[start : start + 8].tobytes()).digest() for start in range(0, length, 8)]
    assert piece_hashes(vector) == expected, "in order, although several threads hash them"


def test_a_description_is_enough_for_the_digest() -> None:
    state = example()
    assert state_digest(3, ["a", "b"], {"b": 20, "a": 10}, 0, state.hashes) == state.digest


def test_a_state_is_hashed_once() -> None:
    state = outer_state("ab")
    before = state.digest
    state.anchor[:] = 1.0
    assert state.digest == before
    assert OuterState(0, ("a", "b"), state.tensors, {}).digest != before


def test_an_empty_vector_has_no_pieces() -> None:
    assert piece_hashes(SharedVector(0).array) == []
    assert len(piece_hashes(SharedVector(LENGTH).array)) == 1
