"""Stopping politely: a site that goes hands its votes to one that stays, so that the others still have a majority.

A vote is in one hand at a time, durably: the giver forgets it before it asks, the heir remembers it before it answers.
When the answer gets lost the vote counts as given. The next committed round gives every member one vote of its own.
"""

from __future__ import annotations

import logging

from pier.v1.peer_pb2 import Ack, LeaveRequest
from pier_node.errors import PierError
from pier_node.outer.round import Rounds
from pier_node.roster import Roster
from pier_node.wire.carrier import LEAVE, BadMessage, Carrier, PeerLost, PeerRefused

TIMEOUT = 5.0
"""Seconds that a peer may take to answer a goodbye."""

log = logging.getLogger(__name__)


class Leave:
    """Takes the votes of sites that stop, and hands over this one's.

    Args:
        rounds: None: this run has no votes, because its sites meet in pairs.
    """

    def __init__(self, carrier: Carrier, roster: Roster, rounds: Rounds | None) -> None:
        self._carrier, self._roster, self._rounds = carrier, roster, rounds
        self._leaving = False
        self._taken: dict[str, LeaveRequest] = {}
        carrier.serve(LEAVE, self._take)

    async def leave(self) -> None:
        """Hand all votes to the first live peer that takes them, and tell the others not to wait."""
        self._leaving = True
        others = [node for node in self._roster.participants() if node != self._carrier.node]
        if self._rounds and others:
            await self._hand_over(others, self._rounds)
        for node in others:
            try:
                await self._carrier.call(node, LEAVE, LeaveRequest(node=self._carrier.node), TIMEOUT)
            except PeerLost as lost:
                log.info("could not say goodbye to %s: %s", node, lost.reason)

    async def _hand_over(self, heirs: list[str], rounds: Rounds) -> None:
        try:
            votes = await rounds.give_votes()
        except PierError as error:
            log.warning("%s: this site keeps its votes", error.problem)
            return
        request = LeaveRequest(node=self._carrier.node, round=rounds.state.round, votes=sorted(votes))
        for heir in heirs if votes else []:
            try:
                await self._carrier.call(heir, LEAVE, request, TIMEOUT)
                return
            except PeerRefused as refused:
                log.info("%s does not take this site's votes: %s", heir, refused.reason)
            except PeerLost as lost:
                log.warning("%s may or may not have this site's votes: %s", heir, lost.reason)
                return
        await rounds.take_votes(request.round, votes)

    async def _take(self, sender: str, request: LeaveRequest) -> Ack:
        rounds = self._rounds
        if request.votes and rounds and self._taken.get(sender) != request:
            if self._leaving:
                raise BadMessage("it is stopping itself")
            try:
                if sender not in rounds.state.members:
                    raise ValueError("whoever gives them is no member here")
                await rounds.take_votes(request.round, request.votes)
            except ValueError as error:
                raise BadMessage(f"it is at round {rounds.state.round}: {error}") from error
            except PierError as error:
                raise BadMessage(f"it cannot write them down: {error.problem}") from error
            self._taken[sender] = request
        self._roster.farewell(sender)
        return Ack()
