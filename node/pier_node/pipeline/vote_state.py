"""The state that all sites of a pipeline share, and how a round advances it. Pure functions.

An outer round (rounds/member.py) decides whether an attempt counts, for all of its sites alike. Its vector is not a
gradient but the name of the attempt's result. A step is taken if every site of the plan is in the round's group and
ready, and all ready sites give the same name. Otherwise the round is empty, and the next attempt begins.

The vector, [68 + 2 S] for S stages: the 64 digits of the name in base 16; how many sites must be ready; the loss; the
number of steps taken, 1 or 0; whether replicas are equal afterwards; which stages get a new version.

Whoever has the token gets into the group of a round, and can say that it is ready. Four rules keep it from deciding:

- In place of tokens, a ready site announces a hash of its vector, which only the sites of the plan know. The largest
  set of sites with one hash is ready, and the others weigh nothing (`OneResult`). So a site that makes up a result does
  not spoil that of the others.
- The mean of equal vectors is that vector. If it has another hash, a site has brought or made up something else, and
  the round is empty.
- The ready sites must include most of the *electors*: the members of the last round that took the last step that
  counted; before the first step, the founder. If none of these was in the last round, all of its members are electors.
  The ready sites must be at least as many as a path has stages.
- Electors lead the rounds and own the shards of their means.

A newcomer takes part in plans as soon as it has its stage, and decides with the others, but not without most of those
that were there before. Not all members of the last round are electors: the rest may be sites that wait for a stage that
nobody can give, and the run must not wait with them. Electors that are gone no longer count after the next round, whose
group are the members then.

The anchor, of the same length: steps; loss; the number of steps when replicas were last equal; then the round and the
first 24 bits of the name of the attempt that counted last, and the same two numbers for each stage's version. While
replicas step apart, versions do not change: a version is what any replica can give to another. The ledger has, for each
site, the round of the last attempt that counted and for which it was ready.

The kind of the next round is a pure function of this state, so all sites agree on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.mean import Update, Weighing
from pier_node.outer.schedule import stepwise
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.iteration_plan import Plan
from pier_node.rounds.quorum import Base, has_quorum
from pier_proto.v1.peer_pb2 import Total

DIGITS, TAG_BITS = 64, 24
SITES, LOSS, STEP, EQUAL, MOVED = range(DIGITS, DIGITS + 5)
STEPS, LAST_LOSS, MET, COUNTED, VERSIONS = 0, 1, 2, 3, 5
BASE, MOST_SITES = 16, 1024
"""Divisors of digits and counts, exact in fp32: a round rejects vectors whose norm is much larger than 1."""
MOST_LOSS = 64.0
"""Largest loss in a vector, in nats per token, for the same reason. A run with such a loss has diverged."""
CLAIM_BYTES = 6
"""Bytes of the hash that a ready site announces: a number of tokens has no more."""


@dataclass(frozen=True)
class VoteState:
    """The position of a run.

    Attributes:
        loss: of the last step.
        versions: of each stage; 0: initial weights.
        met: number of steps after which replicas were last equal.
        counted: the name of the attempt that counted last, in the form of a version.
        electors: the sites most of which must be ready for the next step; empty: not known.
    """

    steps: int
    loss: float
    versions: tuple[int, ...]
    met: int = 0
    counted: int = 0
    electors: frozenset[str] = frozenset()


def length(stages: int) -> int:
    """Number of elements of the vector and of the anchor."""
    return MOVED + 2 * stages


def beginning(stages: int, node: str) -> OuterState:
    """The state before the first round, at the site that founds the run: that counts as if it had taken a step."""
    tensors = {name: SharedVector(length(stages)) for name in (ANCHOR, MOMENTUM)}
    return OuterState(0, (node,), tensors, {node: 1})


def vote_state_of(state: OuterState) -> VoteState:
    """The position of the run in a state."""
    anchor, end = state.anchor, VERSIONS + len(state.anchor) - MOVED
    names = anchor[COUNTED:end].reshape(-1, 2).astype(np.int64)
    counted, *versions = (version(int(round), int(tag)) for round, tag in names)
    steps, loss, met = int(anchor[STEPS]), float(anchor[LAST_LOSS]), int(anchor[MET])
    return VoteState(steps, loss, tuple(versions), met, counted, _electors(state))


def _electors(state: OuterState) -> frozenset[str]:
    return frozenset(state.members) & _stepped(state.ledger) or frozenset(state.members)


def _stepped(ledger: Mapping[str, int]) -> frozenset[str]:
    """The sites that took the last step that counted, or the founder."""
    last = max(ledger.values(), default=0)
    return frozenset(node for node, round in ledger.items() if last and round == last)


def can_decide(nodes: Collection[str], electors: Collection[str]) -> bool:
    """Whether a step can count if exactly these sites are ready; without electors, any can."""
    return not electors or has_quorum(nodes, Base(electors))


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


@dataclass(frozen=True)
class OneResult(Weighing):
    """The weights of a round whose sites announce hashes: equal for the largest set with one hash, 0 for the others."""

    def believed(self, claims: Mapping[str, int], ledger: Mapping[str, int]) -> dict[str, int]:
        """The hash of that set, by site; 0 for the others. Of two sets, most of those that took the last step count."""
        stepped = _stepped(ledger)

        def standing(claim: int) -> tuple[int, int, int]:
            nodes = {node for node, it in claims.items() if it == claim}
            return len(nodes & stepped), len(nodes), claim

        most = max({*claims.values()} - {0}, key=standing, default=0)
        return {node: claim if claim == most else 0 for node, claim in claims.items()}

    def leaders(self, state: OuterState) -> Collection[str]:
        """The electors: with a result of its own a leader makes the round empty, and nothing tells that it did."""
        return _electors(state)

    def owners(self, state: OuterState, group: Collection[str]) -> list[str]:
        """The electors: a mean that is made up makes the round empty, and nothing tells who made it up."""
        electors = _electors(state)
        return [node for node in group if node in electors] or [*group]


ONE_RESULT = OneResult(claim=1, whole=1, most=1.0)


def _claim(vector: Vector) -> int:
    """The hash of a vector, but for its loss, whose mean is rounded. From 1 to 2**48."""
    told = np.delete(vector, LOSS).astype("<f4").tobytes()
    return 1 + int.from_bytes(hashlib.sha256(told).digest()[:CLAIM_BYTES], "big")


def ready(plan: Plan, total: Total, stages: int, apart: bool = False) -> Update:
    """The update of a site that has done its work and could take the step even after a power cut.

    Args:
        apart: the replicas have stepped each on its own.
    """
    moved = total.moved if plan.message.meet else () if apart else plan.visited
    vector = np.zeros(length(stages), np.float32)
    vector[:DIGITS] = np.array([int(digit, 16) for digit in name_of(plan, total).hex()]) / BASE
    vector[SITES], vector[LOSS] = len(plan.stages) / MOST_SITES, min(total.loss, MOST_LOSS)
    vector[STEP], vector[EQUAL] = not plan.message.meet, not apart
    vector[[MOVED + stage for stage in moved]] = 1.0
    return Update(vector, _claim(vector))


def not_ready(stages: int) -> Update:
    """The update of any other site."""
    return Update(np.zeros(length(stages), np.float32), 0)


def advance(config: RunConfig, state: OuterState, exchanged: SharedVector, tokens: Mapping[str, int]) -> OuterState:
    """The state after a round; `tokens` are what OneResult believes."""
    mean, number = exchanged.array, state.round + 1
    anchor, momentum = SharedVector(len(mean)), SharedVector(len(mean))
    anchor.array[:] = state.anchor
    momentum.array[:] = 0
    ledger = {node: state.ledger.get(node, 0) for node in {*state.ledger, *tokens}}
    ready = {node: claim for node, claim in tokens.items() if claim}
    if _counts(config, vote_state_of(state), mean, ready):
        _step(anchor.array, mean, number)
        ledger |= dict.fromkeys(ready, number)
    return OuterState(number, tuple(sorted(tokens)), {ANCHOR: anchor, MOMENTUM: momentum}, ledger)


def _counts(config: RunConfig, voted: VoteState, mean: Vector, ready: Mapping[str, int]) -> bool:
    """Whether a step is taken. Nothing in the mean is trusted: any site could have made it up."""
    turn = turn_of(config, voted)
    if turn is None or {*ready.values()} != {_claim(mean)} or not can_decide(ready, voted.electors):
        return False
    least = 1 if turn is Turn.MEET else config.pipeline.path_length
    return len(ready) >= least and mean[SITES] == np.float32(len(ready) / MOST_SITES) and _is_step(config, turn, mean)


def _is_step(config: RunConfig, turn: Turn, mean: Vector) -> bool:
    """Whether a vector is that of a step in this kind of round."""
    moved, beyond = np.split(mean[MOVED:], [config.pipeline.stages])
    count = np.count_nonzero(moved)
    stages = {
        Turn.TOGETHER: bool(moved[0]) and count >= config.pipeline.path_length,
        Turn.APART: count == 0,
        Turn.MEET: True,
    }
    return (
        stages[turn]
        and bool(np.isin(mean[:DIGITS], np.arange(BASE) / BASE).all())
        and bool(np.isin(moved, (0, 1)).all())
        and not beyond.any()
        and bool(mean[STEP] == (turn is not Turn.MEET))
        and bool(mean[EQUAL] == (turn is not Turn.APART))
        and 0 <= float(mean[LOSS]) <= MOST_LOSS
    )


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
