"""Small outer states, announcements, and sites that hold rounds over the simulated network, for the tests beside."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from simulation.network import Network, SimCarrier, Weather
from simulation.statements import MemoryProofs, PlainStatements
from simulation.virtual_time import run

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import SharedVector, Vector
from pier_node.base.tasks import Signal
from pier_node.config.run import RunConfig
from pier_node.outer.mean import Update
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.attempt import Tools
from pier_node.rounds.commitments import Cast, Commitments
from pier_node.rounds.member import Rounds
from pier_node.rounds.proofs import plan_name
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import ABORT, BEAT, DESCRIBE, GATHER, VOTE, Chunk, PeerLost
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import (
    AbortNotice,
    Ack,
    Ballot,
    Link,
    Manifest,
    Phase,
    Proposal,
    Pulse,
    Ready,
    Share,
    Signed,
    Site,
    StateRequest,
    Value,
    Vote,
)

LENGTH = 12
LONG = 1e6
"""A norm that no update of a test has."""
CALM = Weather(delay=0.01, jitter=0.0)


def config(run: Mapping[str, Any] | None = None, inner: Mapping[str, Any] | None = None, **outer: Any) -> RunConfig:
    return RunConfig.model_validate({"run": run or {}, "inner": inner or {}, "outer": outer})


def fp32(*values: float) -> Vector:
    return np.array(values, np.float32)


def shared(values: Sequence[float] | Vector) -> SharedVector:
    vector = SharedVector(len(values))
    vector.array[:] = values
    return vector


def outer_state(
    members: Sequence[str], round: int = 0, anchor: Sequence[float] | Vector | None = None, **ledger: int
) -> OuterState:
    values = np.zeros(LENGTH, np.float32) if anchor is None else anchor
    tensors = {ANCHOR: shared(values), MOMENTUM: SharedVector(len(values))}
    return OuterState(round, tuple(members), tensors, ledger)


def ballot(number: int, leader: str = "a") -> Ballot:
    return Ballot(number=number, leader=leader)


def value(name: str, members: str, origin: Ballot | None = None) -> Value:
    """A result called `name`, computed by the members (one letter each)."""
    return Value(origin=origin or ballot(1), digest=name.encode() * 32, members=list(members))


def ready(node: str, round: int = 5, **fields: Any) -> Ready:
    return Ready(node=node, round=round, nonce=fields.pop("nonce", node.encode()), votes=[node], **fields)


def voter(node: str, voted: Value, number: int = 1, holds: bool = True, **more: Any) -> Ready:
    return ready(node, seen=ballot(number), voted=voted, voted_in=ballot(number), holds=holds, **more)


def shares(tokens: Mapping[str, int], split: Sequence[tuple[int, int]]) -> list[Share]:
    """Shares of the members in node-id order, for the given (offset, length) each."""
    return [
        Share(node=node, tokens=tokens[node], norm=LONG, offset=start, length=length)
        for node, (start, length) in zip(sorted(tokens), split, strict=True)
    ]


def add_mean(state: OuterState, mean: SharedVector, tokens: Mapping[str, int]) -> OuterState:
    """The simplest way on: the anchor moves by the mean."""
    ledger = {node: state.ledger.get(node, 0) + tokens.get(node, 0) for node in {*state.ledger, *tokens}}
    tensors = {ANCHOR: shared(state.anchor + mean.array), MOMENTUM: state.tensors[MOMENTUM]}
    return OuterState(state.round + 1, tuple(sorted(tokens)), tensors, ledger)


class Memory:
    """A journal, and a disk of states, that tell what happened in which order."""

    def __init__(self, diary: list[str] | None = None, found: Commitments | None = None) -> None:
        self.diary = [] if diary is None else diary
        self.now = found
        self.votes: list[Cast] = []
        self.full = False

    def load(self, round: int, node: str) -> Commitments:
        self.now = (self.now or Commitments.fresh(round, node)).settled(round, node)
        return self.now

    def keep(self, commitments: Commitments) -> None:
        assert self.now
        voted = commitments.vote != self.now.vote and commitments.vote
        if self.full and voted:
            raise OSError("no space left")
        if voted:
            self.votes.append(voted)
        settled = commitments.committed > self.now.committed
        self.diary.append("settled" if settled else "recorded" if voted else "promised")
        self.now = commitments

    async def keep_state(self, state: OuterState) -> None:
        self.diary.append(f"kept {state.round}")


class Puppet:
    """A live site of which a test decides what it answers; it hears what it is asked."""

    def __init__(self, network: Network, node: str, round: int = 0) -> None:
        self.node, self.round, self.digest = node, round, b"?" * 32
        self.carrier = network.join(node)
        self.carrier.serve(BEAT, self._beat)
        self.carrier.serve(GATHER, self._gather)
        self.carrier.serve(VOTE, self._vote)
        self.carrier.serve(ABORT, self._abort)
        self.carrier.serve(DESCRIBE, self._describe)
        self.carrier.serve_push(self._push)
        self.statements = PlainStatements(node)
        self.propose: Callable[[Ready], Proposal] = lambda ready: Proposal(verdict=Proposal.VERDICT_WAIT)
        self.heard: list[Ready] = []
        self.proof: list[Link] = []
        self.asked: list[float] = []
        self.votes: list[Vote] = []
        self.aborts: list[AbortNotice] = []
        self.changed = Signal()

    async def _beat(self, sender: str, pulse: Pulse) -> Pulse:
        site = Site(node=self.node)
        return Pulse(site=site, phase=Phase.PHASE_WAITING, round=self.round, digest=self.digest)

    async def _gather(self, sender: str, signed: Signed) -> Proposal:
        ready = self.statements.read(Ready, signed)
        self.heard.append(ready)
        self.changed.notify()
        await asyncio.sleep(1.0)
        return self.propose(ready)

    async def _describe(self, sender: str, request: StateRequest) -> Manifest:
        self.asked.append(asyncio.get_running_loop().time())
        return Manifest(round=self.round, digest=self.digest, members=["a", "b"], proof=self.proof)

    async def _push(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        await asyncio.Event().wait()

    async def _vote(self, sender: str, signed: Signed) -> Ack:
        self.votes.append(self.statements.read(Vote, signed))
        self.changed.notify()
        return Ack()

    async def _abort(self, sender: str, notice: AbortNotice) -> Ack:
        self.aborts.append(notice)
        self.changed.notify()
        return Ack()


class Neighbour(ABC):
    """A site without training on the simulated network; the diary tells in which order things became durable."""

    def __init__(self, network: Network, node: str) -> None:
        self.node, self.phase, self.diary = node, Phase.PHASE_WAITING, list[str]()
        self.carrier: SimCarrier = network.join(node)
        self.roster = Roster(self.carrier, self.pulse)

    @abstractmethod
    def pulse(self) -> Pulse:
        """What it says of itself."""

    def meet(self, *others: str) -> None:
        for node in others:
            self.roster.add(Site(node=node))
        for contact in self.roster.contacts.values():
            if contact.task:
                self.carrier.tasks.add(contact.task)

    def play(self, part: Coroutine[Any, Any, OuterState]) -> asyncio.Task[OuterState]:
        """Do it as this site, whether or not the test looks at how it ends."""
        task = self.carrier.spawn(part)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task


class Member(Neighbour):
    """A site that holds rounds: carrier, roster and Rounds, without training."""

    def __init__(
        self,
        network: Network,
        node: str,
        state: OuterState,
        found: Commitments | None = None,
        faults: Faults = NO_FAULTS,
    ) -> None:
        super().__init__(network, node)
        self.journal = Memory(self.diary, found)
        disk = self.journal, MemoryProofs(), self.journal.keep_state
        self.statements = PlainStatements(node)
        self.tools = Tools(self.carrier, self.roster, self.statements, *disk, self.fetch_shadow, faults, chunk=2)
        self.rounds = Rounds(self.tools, state, lambda _: LENGTH, nonces(node))
        StateServer(self.carrier, self.rounds.offer, self.rounds.prove)
        self.held: dict[str, OuterState] = {}
        self.needs = 1

    def pulse(self) -> Pulse:
        state = self.rounds.state
        site, coming = Site(node=self.node), state.round + 1
        return Pulse(
            site=site,
            phase=self.phase,
            round=state.round,
            digest=state.digest,
            training_for=coming,
        )

    async def fetch_shadow(self, holders: Any, number: int, value: Value) -> OuterState:
        for holder in holders:
            if holder in self.held:
                return self.held[holder]
        raise PeerLost(next(iter(holders), ""), "has nothing")

    def contribute(self, amount: float, tokens: int = 1) -> asyncio.Task[OuterState]:
        """Take part in the next round with `amount` in every place."""
        update = Update(np.full(LENGTH, amount, np.float32), tokens)
        return self.play(self.rounds.commit(update, add_mean, self.needs))


def link(
    round: int,
    base: bytes,
    digest: bytes,
    members: str,
    group: str = "",
    handovers: Sequence[Signed] = (),
) -> Link:
    """Proof that a group of sites with these one-letter names (else the members) committed a state."""
    first, nodes = ballot(1, members[0]), group or members
    plan = plan_name(base, first, nodes, members)
    signed = [
        PlainStatements(node).seal(Vote(node=node, round=round, ballot=first, digest=digest, plan=plan))
        for node in nodes
    ]
    named = Link(round=round, digest=digest, base=base, ballot=first, members=members)
    named.votes.extend(signed)
    named.handovers.extend(handovers)
    return named


def nonces(node: str) -> Callable[[], bytes]:
    numbers = iter(range(1, 1 << 30))
    return lambda: f"{node}{next(numbers)}".encode()


def assemble(network: Network, names: str, state: OuterState | None = None, **made: Member) -> dict[str, Member]:
    """Members with these one-letter names that know each other, their leaders at work."""
    begin = state or outer_state(tuple(names))
    members = {node: made.get(node) or Member(network, node, begin) for node in names}
    for member in members.values():
        member.meet(*names)
        member.carrier.spawn(member.rounds.run())
    return members


async def acquainted(members: Mapping[str, Neighbour]) -> None:
    """Return once all of them have heard of each other."""
    names = set(members)
    for member in members.values():
        while not names <= set(member.roster.participants()):
            await member.roster.changed.wait()


async def with_puppet(network: Network, found: Commitments | None = None) -> tuple[Puppet, Member]:
    """The member b, and a, which is its leader and does as a test likes."""
    puppet = Puppet(network, "a")
    member = Member(network, "b", outer_state("ab"), found)
    member.meet("a")
    await member.roster.changed.until(lambda: member.roster.alive("a"))
    return puppet, member


Play = Callable[[Network, dict[str, Member]], Coroutine[Any, Any, None]]


def scene(play: Play, names: str = "abc", **faults: Faults) -> None:
    """Members that have met, and what happens to them."""

    async def main() -> None:
        network, begin = Network(1, CALM), outer_state(tuple(names))
        made = {node: Member(network, node, begin, faults=fault) for node, fault in faults.items()}
        members = assemble(network, names, begin, **made)
        await acquainted(members)
        await play(network, members)

    run(main())
