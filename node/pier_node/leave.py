"""Stopping politely: a site that goes hands its votes to one that stays, so that the others still have a majority.

A vote is in one hand at a time, durably: the giver forgets it before it asks, the heir remembers it before it answers.
When the answer gets lost the vote counts as given. The next committed round gives every member one vote of its own.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pier.v1.peer_pb2 import Ack, LeaveRequest
from pier_node import durable
from pier_node.outer.round import Rounds
from pier_node.roster import Roster
from pier_node.wire.carrier import LEAVE, BadMessage, Carrier, PeerLost, PeerRefused

TIMEOUT = 5.0

log = logging.getLogger(__name__)


class Leave:
    """Takes the votes of sites that stop, and hands over this one's.

    Args:
        rounds: None: this run has no votes, because its sites meet in pairs.
        path: where votes that are not simply this node's own are kept.
    """

    def __init__(self, carrier: Carrier, roster: Roster, rounds: Rounds | None, path: Path) -> None:
        self._carrier, self._roster, self._rounds, self._path = carrier, roster, rounds, path
        self._leaving = False
        carrier.serve(LEAVE, self._take)

    def restore(self) -> None:
        """Take up the votes that this node held when it stopped, if its round is still the same."""
        if self._rounds is None or not self._path.exists():
            return
        try:
            kept = durable.read_sealed(self._path)
        except durable.Torn as torn:
            log.warning("%s: this site votes with nothing until it is a member of a round again", torn)
            self._rounds.votes = set()
            return
        if kept["round"] == self._rounds.state.round:
            self._rounds.votes = set(kept["votes"])

    async def leave(self) -> None:
        """Hand all votes to the first live peer that takes them, and tell the others not to wait."""
        self._leaving = True
        others = [node for node in self._roster.participants() if node != self._carrier.node]
        for heir in others:
            if self._rounds is None or await self._hand_to(heir, self._rounds):
                break
        for node in others:
            try:
                await self._carrier.call(node, LEAVE, LeaveRequest(node=self._carrier.node), TIMEOUT)
            except PeerLost as lost:
                log.info("could not say goodbye to %s: %s", node, lost.reason)

    async def _hand_to(self, heir: str, rounds: Rounds) -> bool:
        """Whether the search for an heir is over."""
        votes = rounds.votes
        if not votes or rounds.engaged:  # the heir would not know what binds them already
            return True
        request = LeaveRequest(node=self._carrier.node, round=rounds.state.round, votes=sorted(votes))
        try:
            self._keep(rounds, set())
        except OSError as error:
            log.warning("%s: %s: this site keeps its votes", self._path, error.strerror)
            return True
        try:
            await self._carrier.call(heir, LEAVE, request, TIMEOUT)
        except PeerRefused as refused:
            log.info("%s does not take this site's votes: %s", heir, refused.reason)
            self._keep(rounds, votes)
            return False
        except PeerLost as lost:
            log.warning("%s may or may not have this site's votes: %s", heir, lost.reason)
        return True

    async def _take(self, sender: str, request: LeaveRequest) -> Ack:
        rounds = self._rounds
        if request.votes and rounds:
            if self._leaving:
                raise BadMessage("it is stopping itself")
            if request.round != rounds.state.round or sender not in rounds.state.members:
                raise BadMessage(f"it is at round {rounds.state.round}, and has other members")
            try:
                self._keep(rounds, rounds.votes | set(request.votes))
            except OSError as error:
                raise BadMessage(f"it cannot write them down: {error.strerror}") from error
        self._roster.farewell(sender)
        return Ack()

    def _keep(self, rounds: Rounds, votes: set[str]) -> None:
        durable.replace(self._path, durable.seal({"round": rounds.state.round, "votes": sorted(votes)}))
        rounds.votes = votes
        rounds.renew()
