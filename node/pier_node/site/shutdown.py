"""How a site stops, on Ctrl+C too: it hands its votes to a site that stays. A finished one waits for those behind it.

`commands/daemon.py` turns the signal (`when_stopped`, base/tasks.py) into the end of the daemon's work
(site/daemon.py), which gives an exchange under way four seconds to end, leaves as this file says, and saves what
stopping would lose (replica.py). A second Ctrl+C ends the process at once: it continues from its last checkpoint.

The handover lets the other members keep a quorum. At any time a vote is held by one site, durably: the giver drops it
on disk before it sends it, and the heir stores it before it answers. If the answer is lost, it is not known which of
the two holds the vote. It then counts where both are present (rounds/statements.py), until the next committed round
gives every member one vote of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.outer.schedule import total_rounds
from pier_node.rounds.member import Rounds
from pier_node.rounds.quorum import received
from pier_node.rounds.roster import Roster
from pier_node.wire.bounds import MOST_HANDOVERS, STATEMENT
from pier_node.wire.carrier import LEAVE, BadMessage, Carrier, PeerLost, PeerRefused
from pier_proto.v1.peer_pb2 import Ack, Handover, LeaveRequest, Phase, Pulse, Signed

TIMEOUT = 5.0
"""Seconds that a peer may take to answer a goodbye."""
HEIR_SECONDS = 3 * TIMEOUT
"""Seconds for finding a peer that takes this site's votes: its own line may be cut."""

log = logging.getLogger(__name__)


class Leave:
    """Takes over the votes of sites that stop, and hands over this site's own.

    Args:
        rounds: None: this run has no votes, because its sites meet in pairs.
    """

    def __init__(self, carrier: Carrier, roster: Roster, rounds: Rounds | None) -> None:
        self._carrier, self._roster, self._rounds = carrier, roster, rounds
        self._leaving = False
        self._silent: set[str] = set()
        carrier.serve(LEAVE, self._take)

    async def leave(self) -> None:
        """Hand all votes to the first live peer that accepts them, and tell those that answer that it leaves."""
        self._leaving = True
        others = [node for node in self._roster.participants() if node != self._carrier.node]
        with suppress(TimeoutError):
            async with asyncio.timeout(HEIR_SECONDS):
                for heir in others:
                    if self._rounds is None or await self.hand_to(heir, self._rounds):
                        break
        await asyncio.gather(*(self._goodbye(node) for node in others if node not in self._silent))

    async def _goodbye(self, node: str) -> None:
        try:
            await self._carrier.call(node, LEAVE, LeaveRequest(node=self._carrier.node), TIMEOUT)
        except PeerLost as lost:
            log.info("could not say goodbye to %s: %s", node, lost.reason)

    async def hand_to(self, heir: str, rounds: Rounds) -> bool:
        """Hand all votes to an heir. Returns whether the search for an heir is over.

        A signed handover cannot be withdrawn, so the heir is asked first.
        """
        node, call = self._carrier.node, self._carrier.call
        try:
            await call(heir, LEAVE, LeaveRequest(node=node, asks=rounds.base), TIMEOUT)
        except PeerLost as lost:
            log.info("%s does not take this site's votes: %s", heir, lost.reason)
            if not isinstance(lost, PeerRefused):
                self._silent.add(heir)
            return False
        try:
            if await rounds.give_votes(heir):
                await call(heir, LEAVE, LeaveRequest(node=node, handovers=rounds.handovers()), TIMEOUT)
        except PierError as error:
            log.warning("%s: this site keeps its votes", error.problem)
        except PeerLost as lost:
            log.warning("%s may or may not have this site's votes: %s", heir, lost.reason)
            self._silent.add(heir)  # if it has them, it knows that this site leaves
        return True

    async def _take(self, sender: str, request: LeaveRequest) -> Ack:
        rounds = self._rounds
        if rounds and request.asks:
            state = rounds.state
            if self._leaving:
                raise BadMessage("it is stopping itself")
            if request.asks != rounds.base or sender not in state.members or rounds.promises.lost:
                raise BadMessage(f"it is at round {state.round}, and has other members")
            if not _fit(rounds.handovers(), 0.5):
                raise BadMessage("it has taken the votes of as many sites as its announcements can name")
            return Ack()
        if rounds and request.handovers:
            await self._inherit(sender, request, rounds)
        self._roster.goodbye(sender)
        return Ack()

    async def _inherit(self, sender: str, request: LeaveRequest, rounds: Rounds) -> None:
        """Store the votes. Raises BadMessage: they are of another round, or not meant for this site."""
        state, read, node = rounds.state, rounds.statements.read, self._carrier.node
        if sender not in state.members:
            raise BadMessage(f"it is at round {state.round}, and has other members")
        told = {it.statement: read(Handover, it) for it in request.handovers}
        told = {statement: it for statement, it in told.items() if it.base == rounds.base}
        given = [(it.number, written) for written, it in told.items() if (it.node, it.heir) == (sender, node)]
        if not given:
            raise BadMessage(f"it is at round {state.round}, and is given nothing")
        _, written = max(given)
        if rounds.promises.has_taken(written):
            return
        if not _fit([*rounds.handovers(), *request.handovers], 1):
            raise BadMessage("its announcements could not name all of these handovers")
        votes = received(told.values(), told[written])
        try:
            await rounds.take_votes(state.round, votes, request.handovers)
        except ValueError as error:
            raise BadMessage(f"it is at round {rounds.state.round}: {error}") from error
        except PierError as error:
            raise BadMessage(f"it cannot write them down: {error.problem}") from error


def _fit(handovers: Sequence[Signed], part: float) -> bool:
    """Whether these, and one of this site's own, take up at most that part of what an announcement can have."""
    size = sum(it.ByteSize() for it in handovers)
    return len(handovers) < part * MOST_HANDOVERS and size <= part * STATEMENT / 2


UNFINISHED_SECONDS = 120.0
"""Seconds that a finished site waits for others that still need its last state."""


async def wait_for_unfinished(config: RunConfig, roster: Roster) -> None:
    """Say that this site is done; return once all live sites are, or after UNFINISHED_SECONDS; log which are not."""
    last, piped = total_rounds(config), config.pipeline.stages > 1

    def unfinished(pulse: Pulse) -> bool:
        return pulse.phase not in (Phase.PHASE_DONE, Phase.PHASE_LEAVING) if piped else pulse.round < last

    def behind() -> list[str]:
        pulses = {node: roster.pulse_of(node) for node in roster.contacts}
        return sorted(node for node, pulse in pulses.items() if pulse is not None and unfinished(pulse))

    with suppress(TimeoutError):
        async with asyncio.timeout(UNFINISHED_SECONDS):
            await roster.announce()  # this site may be gone before its next hello
            await roster.changed.until(lambda: not any(map(roster.alive, behind())))
    if left := behind():
        names = ", ".join(map(roster.called, left))
        log.warning(
            "not finished: %s. Once started again, they need this site's last state: start it as well, with the same "
            "command, and it hands it over",
            names,
        )
