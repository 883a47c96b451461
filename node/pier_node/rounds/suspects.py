"""Suspicions: which members the next attempt should do without, and how an attempt or a pair's meeting fails here.

A member is suspected when it was lost, or when what it sent was refused. A suspicion counts for one attempt: it is
forgotten when an attempt begins, or after EXPIRY seconds if none does. A member that keeps the others waiting round
after round, without ever taking part to the end, is left out for longer each time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pier_node.config.run import SITES

NOBODY = ""


class Suspicion(Exception):
    """An attempt cannot continue because a member was lost, or sent something refused; `node` may be NOBODY.

    Attributes:
        mute: the member is there but kept the others waiting until they ran out of patience.
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
"""Seconds; a few times as long as a member waits for the leader's answer."""
LONGEST = 3600.0
"""Longest time in seconds for which a member that is mute again and again is left out."""
STANDSTILL = 30.0
"""Seconds within which a leader closes a group once all sites that are here wait for it."""


@dataclass
class _Mute:
    """How often a site kept others waiting."""

    rounds: int = 0
    last: int = 0
    until: float = 0.0
    """When the site is let in again, in seconds of the loop's clock."""


class Suspects:
    """One member's suspicions in a round: at most as many as a run has sites, since strangers come under any name."""

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
        """Nodes under suspicion now."""
        now = asyncio.get_running_loop().time()
        return {node for node, until in self._until.items() if until > now} | self.left_out()

    def left_out(self) -> set[str]:
        """Nodes that are left out because they kept others waiting again and again."""
        now = asyncio.get_running_loop().time()
        return {node for node, mute in self._mute.items() if mute.until > now}

    def clear(self) -> None:
        """Forget all suspicions of one attempt."""
        self._until.clear()

    def forgive(self, members: Iterable[str]) -> None:
        """Forgive these members: they took part in a round to its end."""
        for node in members:
            self._mute.pop(node, None)


class Standstill:
    """How long a leader has kept everyone here waiting."""

    def __init__(self) -> None:
        self._leader, self._since = "", math.inf

    def too_long(self, leader: str, all_wait: bool) -> bool:
        """Whether the wait exceeds any reason of an honest leader; called at each of the leader's answers."""
        now = asyncio.get_running_loop().time()
        if not all_wait:
            self._since = math.inf
        elif leader != self._leader or self._since == math.inf:
            self._leader, self._since = leader, now
        return now - self._since > STANDSTILL
