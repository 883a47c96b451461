"""Progress checks: which sites say that they have committed a later round than this site, and have proved it.

A pulse is only a claim. A site that makes one is asked for its proof (proofs.py) in the background; until it has
given it, this site continues as before. A site whose proof fails is asked again after a pause that doubles each time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from pier_node.base.errors import PierError
from pier_node.base.tasks import cancel_and_wait
from pier_node.rounds.proofs import Trusted, follow
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Link, Manifest, StateRequest

TIMEOUT = 10.0
"""Seconds within which a peer must answer with a part of its proof."""
PAGES = 1000
"""Most parts that one proof may have."""
FIRST_PAUSE, LAST_PAUSE = 2.0, 600.0
"""Seconds until a site that could not prove its claim is asked again: the first pause, and the longest."""
AT_ONCE = 3
"""Most members that are asked at once, and most other sites; a single valid proof is enough."""
LOOK = 5.0
"""Seconds between two searches for claims, if no pulse brings news earlier."""

log = logging.getLogger(__name__)


@dataclass
class Trust:
    """What a site trusts, and how far a peer has led it on from there.

    Attributes:
        state: the trusted state that the links lead to.
        links: the links that lead to it.
        given: fingerprint of the next state, which is then trusted without proof; "" if there is none.
    """

    state: Trusted
    statements: Statements
    links: list[Link] = field(default_factory=list)
    given: str = ""

    @classmethod
    def of_fingerprint(cls, fingerprint: str, statements: Statements) -> Trust:
        """The trust of a newcomer that was given the fingerprint of a committed state. Raises PierError."""
        match = re.fullmatch(r"(\d{1,15})-[0-9a-f]{40}", fingerprint)
        if not match:
            raise PierError(
                f"--trust {fingerprint}: not the fingerprint of a state, such as 12-3fa9…",
                "`pier-node status` shows it at a site that you trust.",
            )
        return cls(Trusted(int(match[1]) - 1, b"", ()), statements, given=fingerprint)

    def learn(self, links: list[Link]) -> None:
        """Follow links. Raises BadMessage if one of them proves nothing."""
        for link in links:
            if not self.given:
                self.state = follow(self.state, link, self.statements)
            elif (first := Trusted(link.round, bytes(link.digest), tuple(link.members))).fingerprint == self.given:
                self.state, self.given = first, ""
            else:
                raise BadMessage(f"its state of round {link.round} is not the one that this site was told to trust")
            self.links.append(link)

    def admit(self, manifest: Manifest) -> None:
        """Check that the state described by a manifest was committed. Raises BadMessage."""
        self.learn([link for link in manifest.proof if link.round > self.state.round])
        if (self.state.round, self.state.digest) != (manifest.round, manifest.digest):
            raise BadMessage(f"its state of round {manifest.round} comes without proof that it was committed")

    async def led_by(self, peer: str, carrier: Carrier) -> None:
        """Learn everything that a peer can prove. Raises PeerLost."""
        for _ in range(PAGES):
            request = StateRequest(trusted=self.state.round + 1, proof_only=True)
            told = await carrier.call(peer, DESCRIBE, request, TIMEOUT)
            try:
                if told.proof:
                    self.learn(list(told.proof))
                if not told.proof or self.state.round >= told.round:
                    self.admit(told)
                    return
            except BadMessage as bad:
                raise PeerLost(peer, str(bad)) from bad
        raise PeerLost(peer, "its proof has no end")


@dataclass
class _Doubt:
    until: float
    pause: float


class ProgressChecks:
    """Progress checks of the sites on a roster.

    Args:
        here: returns the state that this site has.
    """

    def __init__(self, carrier: Carrier, roster: Roster, statements: Statements, here: Callable[[], Trusted]) -> None:
        self._carrier, self._roster, self._statements, self.here = carrier, roster, statements, here
        self._proven: dict[str, Trust] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}

    def sources(self) -> list[str]:
        """Sites that are ahead and have proved it."""
        round = self.here().round
        return [node for node in self._roster.ahead(round) if self.proof_of(node)]

    def proof_of(self, node: str) -> Trust | None:
        """How far a site has proved that it is ahead; None if it has not."""
        trust = self._proven.get(node)
        return trust if trust and trust.state.round > self.here().round else None

    def unproven(self) -> set[str]:
        """Sites that say they are ahead, were asked for the proof, and could not give it."""
        return {*self._doubts} & {*self._roster.ahead(self.here().round)}

    async def run(self) -> None:
        """Ask for proofs; runs forever."""
        try:
            while True:
                self._ask()
                await self._roster.changed.wait(LOOK)
        finally:
            await cancel_and_wait(*self._asked.values())

    def _ask(self) -> None:
        now, here = asyncio.get_running_loop().time(), self.here()
        ahead = self._roster.ahead(here.round)
        self._doubts = {node: it for node, it in self._doubts.items() if node in self._roster.contacts}
        self._proven = {node: it for node, it in self._proven.items() if it.state.round > here.round}
        for node in ahead:
            doubt = self._doubts.get(node)
            if node in self._proven or node in self._asked or (doubt and now < doubt.until):
                continue
            alike = [other for other in self._asked if (other in here.members) == (node in here.members)]
            if len(alike) >= AT_ONCE:
                continue
            task = self._asked[node] = asyncio.create_task(self._prove(node, here))
            task.add_done_callback(lambda _, node=node: self._asked.pop(node, None))  # type: ignore[misc]

    async def _prove(self, node: str, here: Trusted) -> None:
        trust = Trust(here, self._statements)
        try:
            await trust.led_by(node, self._carrier)
        except PeerLost as lost:
            pause = min(2 * self._doubts[node].pause, LAST_PAUSE) if node in self._doubts else FIRST_PAUSE
            self._doubts[node] = _Doubt(asyncio.get_running_loop().time() + pause, pause)
            log.info("%s has not proved yet that it is ahead: %s", node, lost.reason)
            return
        self._doubts.pop(node, None)
        self._proven[node] = trust
        self._roster.changed.notify()
