"""Disputes: find sites that hold a different history of the run than this one, and the nodes that made it possible.

Atomic rounds give all sites one history. If there are two, a member voted on both sides of a partition. This site asks
a peer for its links (certificate.py) if the peer's pulse names a different digest for a round that this site has, or if
the peer cannot prove from here that it is ahead. A bisection finds the first round that differs, and the votes of both
sides there are compared. What a pulse says is only a claim: without a link nothing follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pier_node.rounds.certificate import follow
from pier_node.rounds.double_votes import double_votes
from pier_node.rounds.progress_checks import TIMEOUT, ProgressChecks
from pier_node.rounds.proofs import Proofs
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import DoubleVote, Link, Pulse, StateRequest

FIRST_PAUSE, LAST_PAUSE = 5.0, 600.0
"""Seconds until a site is asked again: the first pause, and the longest."""
LOOK = 5.0
"""Seconds between two comparisons of digests, if no pulse brings news earlier."""

log = logging.getLogger(__name__)


@dataclass
class _Pause:
    until: float = 0.0
    seconds: float = FIRST_PAUSE


class Disputes:
    """Disputes of this site with sites on its roster.

    Args:
        convict: excludes the node that a double vote convicts.
        claims: names the nodes whose proof that they are ahead does not follow from this site's state.
    """

    def __init__(
        self,
        carrier: Carrier,
        roster: Roster,
        proofs: Proofs,
        statements: Statements,
        convict: Callable[[DoubleVote], None],
        claims: ProgressChecks,
    ) -> None:
        self._carrier, self._roster, self._proofs, self._statements = carrier, roster, proofs, statements
        self._convict, self._claims = convict, claims
        self._pauses: dict[str, _Pause] = {}
        self._told: set[int] = set()

    async def run(self) -> None:
        """Examine every dispute, one after another; runs forever."""
        while True:
            for node, pulse in self._disputed().items():
                try:
                    await self._examine(node, pulse.round)
                except (PeerLost, BadMessage) as problem:
                    log.debug("%s says that it holds another history, and does not prove it: %s", node, problem)
            await self._roster.changed.wait(LOOK)

    def _disputed(self) -> dict[str, Pulse]:
        """The peers to ask now, members of the run's rounds first."""
        now, pulses, unproven = asyncio.get_running_loop().time(), self._roster.pulses(), self._claims.unproven()
        found = [node for node, pulse in pulses.items() if node in unproven or self._differs(pulse)]
        self._pauses = {node: it for node, it in self._pauses.items() if node in self._roster.contacts}
        due = [node for node in found if node != self._roster.node and now >= self._pauses.get(node, _Pause()).until]
        for node in due:
            pause = self._pauses.setdefault(node, _Pause())
            pause.until, pause.seconds = now + pause.seconds, min(2 * pause.seconds, LAST_PAUSE)
        return {node: pulses[node] for node in sorted(due, key=lambda node: not self._proofs.has_member(node))}

    def _differs(self, pulse: Pulse) -> bool:
        ours = self._proofs.at(pulse.round) if pulse.round <= self._claims.here().round else None
        return ours is not None and pulse.digest not in (b"", ours.digest)

    async def _examine(self, node: str, high: int) -> None:
        """Find the first round that differs. Raises PeerLost, and BadMessage if a link is not what it should be."""
        held = self._claims.here().round  # after a crash the file may have the link of a state that nobody holds
        low, high, first = self._proofs.first - 1, min(high, self._proofs.newest, held), None
        while low < high:
            middle = (low + high + 1) // 2
            theirs = await self._next_link(node, middle)
            ours = self._proofs.of(theirs.round) if theirs else None
            if theirs and ours and ours.digest == theirs.digest:
                low = theirs.round
                continue
            high = middle - 1
            if theirs and ours:
                first = ours, theirs
        if first:
            self._compare(node, *first)

    async def _next_link(self, node: str, round: int) -> Link | None:
        """The first link that a site has for that round or a later one."""
        told = await self._carrier.call(node, DESCRIBE, StateRequest(trusted=round, proof_only=True), TIMEOUT)
        return told.proof[0] if told.proof and told.proof[0].round >= round else None

    def _compare(self, node: str, ours: Link, theirs: Link) -> None:
        for proof in double_votes(ours, theirs, self._statements):
            self._convict(proof)
        before = self._proofs.at(ours.round - 1)
        if before is None or ours.round in self._told:
            return
        follow(before, theirs, self._statements)
        self._told.add(ours.round)
        both = {it.node for it in ours.votes} & {it.node for it in theirs.votes}
        log.error(
            "round %d was committed twice, as %s here and as %s at %s; %s voted for both. The run has two histories: "
            "keep the sites of one, and start the others again with empty data folders (docs/protocol.md)",
            ours.round,
            ours.digest.hex()[:12],
            theirs.digest.hex()[:12],
            self._roster.called(node),
            ", ".join(map(self._roster.called, sorted(both))) or "nobody",
        )
