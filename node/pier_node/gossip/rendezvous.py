"""Rendezvous: how the two sites of a pair find each other without any third site.

Each site computes its partner from what it knows of the roster, and asks it. The partner holds the question open until
it is ready too. They meet when each wants the other; rosters that differ for a moment cost only one more question. A
site waits no longer than a learned deadline, and only while its partner is alive on the roster. A site that is left
over continues alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from pier_node.base.patience import LearnedWait
from pier_node.base.tasks import Signal, first_of
from pier_node.gossip.standing import Standing
from pier_node.outer.noloco import groups, partner
from pier_node.rounds.leader import POLL
from pier_node.wire.carrier import MEET, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import MeetReply, MeetRequest

PAUSE = 1.0
"""Longest pause in seconds before a partner that wanted another site is asked again; roster news end it early."""
DISAGREEMENTS = 3
"""Number of times that a partner may want another site before this site continues alone."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Met:
    """Who was met, what it said of itself, and what it was told of us."""

    node: str
    said: MeetRequest
    told: MeetRequest


@dataclass
class _Here:
    """This site is ready for a round: whom it asks, or whether it hosts strangers; whom it has met; and whether it has
    continued alone."""

    round: int
    describe: Callable[[str], MeetRequest]
    told: dict[str, MeetRequest] = field(default_factory=dict)
    wanted: str = ""
    hosts: bool = False
    met: Met | None = None
    gone: bool = False

    def tell(self, node: str) -> MeetRequest:
        """What a site is told of us: the same every time, since both sides rely on it."""
        if node not in self.told:
            self.told[node] = self.describe(node)
        return self.told[node]

    def meet(self, node: str, said: MeetRequest) -> None:
        """Meet the first site that wants us while we want it."""
        if self.met is None and not self.gone:
            self.met = Met(node, said, self.tell(node))


@dataclass(frozen=True)
class _Pairing:
    """Whom this site meets in a round.

    Sites with standing are paired with each other. If there are strangers, the site that is left over is their host;
    if none is, the last pair are hosts, in every other round. A host meets the first stranger that asks it. So those
    that never come take nobody's partner.

    Attributes:
        of: the round, the sites with standing, and the strangers.
        partner: whom this site asks.
        hosts: whether this site asks nobody, but meets a stranger that asks it.
    """

    of: tuple[int, list[str], list[str]]
    partner: str = ""
    hosts: bool = False

    @classmethod
    def drawn(cls, seed: int, round: int, known: list[str], strangers: list[str], node: str) -> Self:
        pairs, of = groups(seed, round, known or strangers), (round, known, strangers)
        hosts = pairs[-1] if known and strangers and (len(pairs[-1]) == 1 or round % 2) else ()
        if node in hosts:
            return cls(of, hosts=True)
        if known and node in strangers:
            return cls(of, hosts[strangers.index(node) % len(hosts)] if hosts else "")
        return cls(of, partner(seed, round, known or strangers, node) or "")


class Rendezvous:
    """One site's side of the rendezvous.

    Args:
        committed: returns the last round that this site has taken.
        news: notified when something here changes.
    """

    def __init__(
        self, carrier: Carrier, standing: Standing, seed: int, committed: Callable[[], int], news: Signal
    ) -> None:
        self._carrier, self._standing, self._roster = carrier, standing, standing.roster
        self._seed, self._committed = seed, committed
        self._news = news
        self._here: _Here | None = None
        self._pairing = _Pairing((0, [], []))
        self.deadline = LearnedWait(initial=300.0, floor=5.0)
        carrier.serve(MEET, self._answer)

    def expected(self, round: int) -> str:
        """The site that this site would ask for a meeting in a round, by what it knows now; "" if there is none."""
        return self._pairing_of(round).partner

    def _pairing_of(self, round: int) -> _Pairing:
        known, strangers = self._standing.participants()
        if self._pairing.of != (round, known, strangers):
            self._pairing = _Pairing.drawn(self._seed, round, known, strangers, self._carrier.node)
        return self._pairing

    async def find(self, round: int, describe: Callable[[str], MeetRequest], allowance: float) -> Met | None:
        """Meet the partner of this round; None means go alone. `leave` must be called in either case.

        Args:
            describe: returns what a site is told of us.
            allowance: seconds to wait beyond the learned deadline; nothing is learned from such a wait.
        """
        loop, here = asyncio.get_running_loop(), _Here(round, describe)
        self._here, began = here, loop.time()
        try:
            async with asyncio.timeout(self.deadline.seconds() + allowance):
                await self._find(here)
        except TimeoutError:
            log.info("round %d: %s did not come in time", round, here.wanted)
        here.gone = here.met is None
        self._news.notify()
        if here.met and not allowance:
            self.deadline.saw(loop.time() - began)
        return here.met

    def leave(self) -> None:
        """End the round: no question about it waits any longer."""
        self._here = None
        self._news.notify()

    def is_over(self, round: int) -> bool:
        """Whether this site can no longer meet any site in a round."""
        here = self._here
        return round <= self._committed() or (here is not None and (here.round > round or here.gone))

    async def _find(self, here: _Here) -> None:
        disagreements = 0
        while disagreements < DISAGREEMENTS:
            pairing = self._pairing_of(here.round)
            here.wanted, here.hosts = pairing.partner, pairing.hosts
            self._news.notify()
            if here.met or not (here.wanted or here.hosts):
                return
            verdict = await self._verdict(here)
            if here.met or verdict == MeetReply.VERDICT_OVER:
                return
            if verdict == MeetReply.VERDICT_OTHER:
                disagreements += 1
                await self._roster.changed.wait(PAUSE)

    async def _verdict(self, here: _Here) -> MeetReply.Verdict.ValueType | None:
        """Wait for the first of: the partner's verdict, its own question, or a roster that changes the partner."""

        def is_redrawn() -> bool:
            pairing = self._pairing_of(here.round)
            return (pairing.partner, pairing.hosts) != (here.wanted, here.hosts)

        met = self._news.until(lambda: here.met is not None)
        ways = met, self._roster.changed.until(is_redrawn)
        return await (first_of(*ways) if here.hosts else first_of(self._ask(here), *ways))

    async def _ask(self, here: _Here) -> MeetReply.Verdict.ValueType:
        """Ask until there is a verdict. A lost partner is asked again: the roster says when it is gone."""
        node = here.wanted
        while True:
            try:
                reply = await self._carrier.call(node, MEET, here.tell(node), 2 * POLL)
            except PeerLost as lost:
                log.info("round %d: cannot ask %s: %s", here.round, node, lost.reason)
                await self._roster.changed.wait(PAUSE)
                continue
            if reply.verdict == MeetReply.VERDICT_READY:
                here.meet(node, reply.partner)
            if reply.verdict == MeetReply.VERDICT_OTHER:
                log.info("round %d: %s meets %s instead", here.round, node, reply.other or "nobody")
            if reply.verdict != MeetReply.VERDICT_WAIT:
                return reply.verdict

    async def _answer(self, sender: str, request: MeetRequest) -> MeetReply:
        def ready() -> bool:
            here = self._here
            return request.round <= self._committed() or (here is not None and here.round >= request.round)

        try:
            async with asyncio.timeout(POLL):
                await self._news.until(ready)
        except TimeoutError:
            return MeetReply(verdict=MeetReply.VERDICT_WAIT)
        here = self._here
        if here is None or self.is_over(request.round):
            return MeetReply(verdict=MeetReply.VERDICT_OVER)
        if here.wanted == sender or (here.hosts and not self._standing.has(sender)):
            here.meet(sender, request)
            self._news.notify()
        if here.met and (here.met.node, here.met.said.nonce) == (sender, request.nonce):
            return MeetReply(verdict=MeetReply.VERDICT_READY, partner=here.tell(sender))
        if here.met:
            return MeetReply(verdict=MeetReply.VERDICT_OVER)
        return MeetReply(verdict=MeetReply.VERDICT_OTHER, other=here.wanted)


def meeting_name(round: int, one: tuple[str, bytes], other: tuple[str, bytes]) -> bytes:
    """The name of a meeting, 32 bytes, from its round and both sides' nodes and nonces."""
    sides = [[node, nonce.hex()] for node, nonce in sorted([one, other])]
    return hashlib.sha256(json.dumps([round, sides]).encode()).digest()
