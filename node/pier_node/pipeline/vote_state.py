"""The state that all sites of a pipeline share, and how a round advances it. Pure functions.

An outer round (rounds/member.py) decides whether an attempt counts, for all of its sites alike. Its vector is not a
gradient but the name of the attempt's result. A step is taken if every site of the plan is in the round's group and
ready, and all ready sites give the same name. Otherwise the round is empty, and the next attempt begins.

The vector, [68 + 2 S] for S stages: 32 digits of the name in base 16, and their squares, whose means show whether all
names are equal; how many sites must be ready; the loss; the number of steps taken, 1 or 0; whether replicas are equal
afterwards; which stages get a new version.

The anchor, of the same length: steps; loss; the number of steps when replicas were last equal; then the round and the
first 24 bits of the name of the attempt that counted last, and the same two numbers for each stage's version. While
replicas step apart, versions do not change: a version is what any replica can give to another.

The kind of the next round is a pure function of this state, so all sites agree on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.mean import Update
from pier_node.outer.schedule import stepwise
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.iteration_plan import Plan
from pier_proto.v1.peer_pb2 import Total

DIGITS, TAG_BITS = 32, 24
SITES, LOSS, STEP, EQUAL, MOVED = range(2 * DIGITS, 2 * DIGITS + 5)
STEPS, LAST_LOSS, MET, COUNTED, VERSIONS = 0, 1, 2, 3, 5
BASE, MOST_SITES = 16, 1024
"""Divisors of digits and counts, exact in fp32: a round rejects vectors whose norm is much larger than 1."""


@dataclass(frozen=True)
class VoteState:
    """The position of a run.

    Attributes:
        steps: number of steps taken.
        loss: of the last step.
        versions: of each stage; 0: initial weights.
        met: number of steps after which replicas were last equal.
        counted: the name of the attempt that counted last, in the form of a version.
    """

    steps: int
    loss: float
    versions: tuple[int, ...]
    met: int = 0
    counted: int = 0


def length(stages: int) -> int:
    """Number of elements of the vector and of the anchor."""
    return MOVED + 2 * stages


def beginning(stages: int, node: str) -> OuterState:
    """The state before the first round, at the site that founds the run."""
    tensors = {name: SharedVector(length(stages)) for name in (ANCHOR, MOMENTUM)}
    return OuterState(0, (node,), tensors, {})


def vote_state_of(state: OuterState) -> VoteState:
    """The position of the run in a state."""
    anchor, end = state.anchor, VERSIONS + len(state.anchor) - MOVED
    names = anchor[COUNTED:end].reshape(-1, 2).astype(np.int64)
    counted, *versions = (version(int(round), int(tag)) for round, tag in names)
    return VoteState(int(anchor[STEPS]), float(anchor[LAST_LOSS]), tuple(versions), int(anchor[MET]), counted)


def version(round: int, tag: int) -> int:
    """Version of a stage that a round has stepped. The tag distinguishes several attempts of one round."""
    return round << TAG_BITS | tag


def round_of(version: int) -> int:
    """The round that made a version."""
    return version >> TAG_BITS


def name_of(plan: Plan, total: Total) -> bytes:
    """The name of an attempt's result."""
    return hashlib.sha256(plan.name + total.SerializeToString(deterministic=True)).digest()


def tag_of(name: bytes) -> int:
    """The first TAG_BITS bits of a name."""
    return int.from_bytes(name[: TAG_BITS // 8], "big")


def ready(plan: Plan, total: Total, stages: int, apart: bool = False) -> Update:
    """The update of a site that has done its work and could take the step even after a power cut.

    Args:
        apart: the replicas have stepped each on its own.
    """
    moved = total.moved if plan.message.meet else () if apart else plan.visited
    vector = np.zeros(length(stages), np.float32)
    digits = np.array([int(digit, 16) for digit in name_of(plan, total).hex()[:DIGITS]]) / BASE
    vector[:DIGITS], vector[DIGITS:SITES] = digits, np.square(digits)
    vector[SITES], vector[LOSS] = len(plan.stages) / MOST_SITES, total.loss
    vector[STEP], vector[EQUAL] = not plan.message.meet, not apart
    vector[[MOVED + stage for stage in moved]] = 1.0
    return Update(vector, 1)


def not_ready(stages: int) -> Update:
    """The update of any other site."""
    return Update(np.zeros(length(stages), np.float32), 0)


def advance(state: OuterState, exchanged: SharedVector, tokens: Mapping[str, int]) -> OuterState:
    """The state after a round; `tokens` is 1 for each member that is ready and 0 for the others."""
    mean = exchanged.array
    anchor, momentum = SharedVector(len(mean)), SharedVector(len(mean))
    anchor.array[:] = state.anchor
    momentum.array[:] = 0
    digits, squares = mean[:DIGITS], mean[DIGITS:SITES]
    counted = sum(1 for count in tokens.values() if count)
    if counted and counted == mean[SITES] * MOST_SITES and np.array_equal(digits * digits, squares):
        _step(anchor.array, mean, state.round + 1)
    ledger = {node: state.ledger.get(node, 0) + tokens.get(node, 0) for node in {*state.ledger, *tokens}}
    tensors = {ANCHOR: anchor, MOMENTUM: momentum}
    return OuterState(state.round + 1, tuple(sorted(tokens)), tensors, ledger)


def _step(anchor: Vector, mean: Vector, round: int) -> None:
    if mean[STEP]:
        anchor[STEPS] += 1
        anchor[LAST_LOSS] = mean[LOSS]
    if mean[EQUAL]:
        anchor[MET] = anchor[STEPS]
    tag = int("".join(f"{int(digit * BASE):x}" for digit in mean[: TAG_BITS // 4]), 16)
    for place in (COUNTED, *(VERSIONS + 2 * int(stage) for stage in np.flatnonzero(mean[MOVED:]))):
        anchor[place : place + 2] = round, tag


class Turn(Enum):
    """How a round advances the stages."""

    TOGETHER = "together"
    """An iteration: the replicas of a stage average their gradients and take the same step."""
    APART = "apart"
    """An iteration: each replica steps with the gradient of its own microbatches."""
    MEET = "meet"
    """No iteration: the replicas of each stage take an outer step with the mean of what they did apart."""


def turn_of(config: RunConfig, voted: VoteState) -> Turn | None:
    """The kind of the round after a state; None: the run is over."""
    steps, total = voted.steps, config.inner.total_steps
    apart = steps - voted.met
    if apart and (steps >= total or apart >= config.outer.inner_steps):
        return Turn.MEET
    if steps >= total:
        return None
    return Turn.TOGETHER if steps < stepwise(config) else Turn.APART
