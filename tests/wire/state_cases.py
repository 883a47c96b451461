"""States to send in tests, and a site that serves one."""

from __future__ import annotations

import numpy as np
from wire.memory_carrier import MemoryNet

from pier_node.base.shared import SharedVector
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, MOMENTUM, OuterState
from pier_node.wire.states import StateServer

PIECE = 8
"""Elements in a piece in these tests."""


def vector(length: int, seed: int) -> SharedVector:
    shared = SharedVector(length)
    shared.array[:] = np.random.default_rng(seed).standard_normal(length)
    return shared


def outer_state(length: int, round: int = 7, seed: int = 1, adam: bool = False) -> OuterState:
    names = [ANCHOR, MOMENTUM, *([ADAM_M, ADAM_V] if adam else [])]
    tensors = {name: vector(length, seed + number) for number, name in enumerate(names)}
    if adam:
        tensors[ADAM_V].array[:] **= 2
    return OuterState(round, ("a", "b"), tensors, {"a": 300, "b": 2**40}, adam_step=9 if adam else 0)


class Site:
    """A node that serves what a test assigns to it."""

    def __init__(self, net: MemoryNet, node: str, state: OuterState, idle: float = 60.0) -> None:
        self.state = state
        self.staged: OuterState | None = None
        self.server = StateServer(net.join(node), self.offer, idle=idle)

    def offer(self, round: int, shadow: bool) -> OuterState | None:
        state = self.staged if shadow else self.state
        return state if state and round in (0, state.round) else None


def same_bits(one: OuterState, other: OuterState) -> bool:
    """Equal in everything, compared by bits and not by what either one believes about itself."""
    heads = [(state.round, state.members, state.ledger, state.adam_step) for state in (one, other)]
    tensors = [{name: shared.array.tobytes() for name, shared in state.tensors.items()} for state in (one, other)]
    return heads[0] == heads[1] and tensors[0] == tensors[1]
