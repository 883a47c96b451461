"""Members' parts in one attempt, played without a leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from rounds.cases import CALM, LENGTH, Member, add_mean, ballot, outer_state, shares
from simulation.network import Network
from simulation.statements import PlainStatements
from simulation.virtual_time import run

from pier_node.base.faults import Faults
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_node.rounds.attempt import Attempt
from pier_node.rounds.commitments import Cast
from pier_node.rounds.suspects import Suspicion
from pier_proto.v1.peer_pb2 import Ballot, Link, Proposal, Ready, Signed, Value, Vote

BALLOT = ballot(3, "a")


def fresh(*names: str) -> Proposal:
    width = LENGTH // len(names)
    dealt = shares(dict.fromkeys(names, 1), [(width * index, width) for index in range(len(names))])
    readies = [_announced(node) for node in names]
    return Proposal(verdict=Proposal.VERDICT_GO, round=1, ballot=BALLOT, shares=dealt, readies=readies)


def _announced(node: str, seen: Ballot | None = None) -> Signed:
    return PlainStatements(node).seal(Ready(node=node, round=1, votes=[node], seen=seen))


def adopting(result: OuterState, members: str, holders: str, *names: str) -> Proposal:
    origin = ballot(1)
    adopted = Value(origin=origin, digest=result.digest, members=list(members))
    return Proposal(
        verdict=Proposal.VERDICT_GO,
        round=1,
        ballot=BALLOT,
        shares=fresh(*names).shares,
        readies=[_announced(node, origin if node in members else None) for node in names],
        adopt=adopted,
        holders=list(holders),
    )


def vote(node: str, number: int = 3) -> Vote:
    return Vote(node=node, round=1, ballot=ballot(number), digest=b"x" * 32, plan=b"p" * 32)


def signed(message: Vote) -> Signed:
    return PlainStatements(message.node).seal(message)


class Part:
    """One member's part in an attempt."""

    def __init__(self, member: Member, proposal: Proposal, held: OuterState | None = None) -> None:
        self.member, self.proposal, self.held = member, proposal, held
        mine = Ready(node=member.node, round=1, base=member.rounds.base, votes=[member.node])
        self.attempt = Attempt(member.tools, member.rounds.state, member.rounds.promises, proposal, mine)
        member.rounds._attempt = self.attempt
        update = Update(np.full(LENGTH, ord(member.node) - ord("a"), np.float32), 1)
        self.decided: tuple[OuterState, Link]
        self.task = member.play(self._run(update))

    async def _run(self, update: Update) -> OuterState:
        promises = self.member.rounds.promises
        if held := self.held:
            await promises.promise(ballot(1), promises.votes)
            await promises.cast(Cast((1, "a"), (1, "a"), held.digest, held.members), held)
            self.member.journal.votes.clear()
        await promises.promise(self.proposal.ballot, promises.votes)
        self.member.diary.clear()
        self.decided = await self.attempt.run(update, add_mean)
        return self.decided[0]

    async def suspicion(self) -> Suspicion:
        with pytest.raises(Suspicion) as caught:
            await self.task
        return caught.value


def scene(play: Callable[[dict[str, Member]], Coroutine[Any, Any, None]], names: str = "abc", **faults: Faults) -> None:
    async def main() -> None:
        network, begin = Network(1, CALM), outer_state(tuple(names))
        made = {node: Member(network, node, begin, faults=faults.get(node, Faults())) for node in names}
        for member in made.values():
            member.meet(*names)
        await asyncio.sleep(3)
        await play(made)

    run(main())


def stop_at(phase: str) -> Faults:
    async def strike(round: int, reached: str) -> None:
        if reached == phase:
            await asyncio.Event().wait()

    return Faults(strike)
