"""Whom the next attempt should do without: members that were lost, or refused for what they sent.

A suspicion counts for one attempt: it is forgotten when one begins, and after a while if none does. But a member that
lets the others wait in round after round, without ever taking part to the end, is left out for longer each time.

How an attempt, or a pair's meeting, ends without a result here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pier_node.config.run import SITES

NOBODY = ""


class Suspicion(Exception):
    """It cannot go on because of a member: lost, or refused for what it sent; `node` may be NOBODY.

    Attributes:
        mute: the member is there, but kept the others waiting until their patience was at its end.
    """

    def __init__(self, node: str, reason: str, mute: bool = False) -> None:
        super().__init__(f"{node}: {reason}" if node else reason)
        self.node = node
        self.reason = reason
        self.mute = mute


class Behind(Exception):
    """The round was decided without us: catch up from `peers`."""

    def __init__(self, peers: Collection[str]) -> None:
        super().__init__(", ".join(peers))
        self.peers = tuple(peers)


EXPIRY = 30.0
"""Seconds; a few times what a member waits for the leader's answer."""
LONGEST = 3600.0
"""Seconds for which a member that is mute again and again is left out at most."""
STANDSTILL = 30.0
"""Seconds in which a leader has closed a group when all that are here wait for it."""


@dataclass
class _Mute:
    """How often a site let others wait."""

    rounds: int = 0
    last: int = 0
    until: float = 0.0
    """When it is left out no longer."""


class Suspects:
    """One member's suspicions in a round: of as many sites as a run can have, since strangers come under any name."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._mute: dict[str, _Mute] = {}

    def add(self, node: str, mute_in: int = 0) -> None:
        """Suspect a member from now on.

        Args:
            mute_in: the round in which it kept the others waiting.
        """
        now = asyncio.get_running_loop().time()
        self._until = {name: until for name, until in self._until.items() if until > now}
        self._until[node] = now + EXPIRY
        if len(self._until) > SITES:
            del self._until[min(self._until, key=self._until.__getitem__)]
        if mute_in:
            self._add_mute(node, mute_in, now)

    def _add_mute(self, node: str, round: int, now: float) -> None:
        mute = self._mute.setdefault(node, _Mute())
        if round > mute.last:
            mute.rounds, mute.last = mute.rounds + 1, round
            mute.until = now + min(EXPIRY * 2 ** (mute.rounds - 1), LONGEST) if mute.rounds > 1 else now
        if len(self._mute) > SITES:
            del self._mute[min(self._mute, key=lambda name: (self._mute[name].rounds, self._mute[name].last))]

    def now(self) -> set[str]:
        """Those under suspicion."""
        now = asyncio.get_running_loop().time()
        return {node for node, until in self._until.items() if until > now} | self.left_out()

    def left_out(self) -> set[str]:
        """Those that let others wait again and again."""
        now = asyncio.get_running_loop().time()
        return {node for node, mute in self._mute.items() if mute.until > now}

    def clear(self) -> None:
        """Forget all suspicions of one attempt."""
        self._until.clear()

    def forgive(self, members: Iterable[str]) -> None:
        """These took part in a round to its end."""
        for node in members:
            self._mute.pop(node, None)


class Standstill:
    """How long a leader has let all wait that are here."""

    def __init__(self) -> None:
        self._leader, self._since = "", math.inf

    def too_long(self, leader: str, all_wait: bool) -> bool:
        """Whether that goes on for longer than any reason of an honest leader; told at each of its answers."""
        now = asyncio.get_running_loop().time()
        if not all_wait:
            self._since = math.inf
        elif leader != self._leader or self._since == math.inf:
            self._leader, self._since = leader, now
        return now - self._since > STANDSTILL
