"""The deadline of a round: how long its leader waits for members that have not arrived.

The leader closes the group when all that may come have arrived. It learns from earlier rounds how long after the first
member the others arrive (base/patience.py), and waits for so long from the moment when those that are here could decide
a round: if one member comes long before the others, the clock does not run for it. A site that says it is waiting but
does not arrive is waited for once: not again until it trains or arrives. If that happens round after round, it is not
waited for at all for a while, and that while grows. A site that was not a member of the last round is never waited for
longer than COMING, whatever it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

from pier_node.base.patience import LearnedWait
from pier_node.config.run import SITES
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Suspects
from pier_proto.v1.peer_pb2 import Ready

COMING = 10.0
"""Seconds within which a site that says it waits for a round has reached its leader."""


class RoundDeadline:
    """Decides how long the rounds of one leader wait.

    Args:
        learned: learns how long after the first member the others arrive.
    """

    def __init__(self, roster: Roster, learned: LearnedWait) -> None:
        self._roster, self._learned = roster, learned
        self._since: dict[str, tuple[bytes, float]] = {}
        self._absent: set[str] = set()
        self._tardy = Suspects()

    def begin(self) -> None:
        """Another round: nobody has announced itself for it."""
        self._since = {}

    def heard(self, node: str) -> None:
        """A node that was waited for in vain has arrived after all."""
        self._absent.discard(node)

    def arrived(self, ready: Ready, base: Collection[str]) -> float:
        """Note an announcement; return when it first arrived, in seconds of the loop's clock.

        A member keeps asking with the same announcement.

        Args:
            base: the members of the last round; of others, only as many are remembered as a run has sites.
        """
        now = asyncio.get_running_loop().time()
        nonce, at = self._since.pop(ready.node, (b"", now))
        if len(self._since) >= SITES:
            strangers = (node for node in self._since if node not in base)
            del self._since[next(strangers, next(iter(self._since)))]
        at = at if nonce == ready.nonce else now
        self._since[ready.node] = ready.nonce, at
        return at

    def wait_or_give_up(
        self, readies: Mapping[str, Ready], waited: float, base: Collection[str], abreast: Iterable[str]
    ) -> float:
        """Seconds to wait for members that may still arrive; 0: none is waited for any longer, which is remembered.

        Args:
            readies: what has arrived, by node.
            waited: seconds since those that have arrived can decide the round.
            base: the members of the last round.
            abreast: live sites that may take part in this round.
        """
        suspects = {node for ready in readies.values() for node in ready.suspects}
        awaited = set(abreast) - suspects - set(readies) - self._tardy.left_out()
        idle = {node for node in awaited | self._absent if self._roster.waits(node)}
        self._absent &= idle
        awaited -= self._absent
        strangers = awaited - {*base}
        patience = self._learned.seconds() if awaited - idle - strangers else min(self._learned.seconds(), COMING)
        if awaited and waited < patience:
            return patience - waited
        self._absent |= awaited & idle
        for node in awaited & (idle | strangers):
            self._tardy.add(node, next(iter(readies.values())).round)
        return 0.0

    def seconds_for_introductions(self, group: frozenset[str], waited: float) -> float:
        """Seconds to wait for members that this site has not met yet: their next beat says where they are reached.

        A leader that has just been started again would drop them from the round, which would then rest on fewer votes.
        """
        return 0.0 if group <= {self._roster.node, *self._roster.contacts} else COMING * self._roster.crowd - waited

    def closed(self, group: Iterable[str], delays: Iterable[float]) -> None:
        """The group is closed; learn from how many seconds after the first member each one arrived."""
        self._tardy.forgive(group)
        for seconds in delays:
            self._learned.saw(seconds)
