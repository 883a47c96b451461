"""Suspicions: which members the next attempt should do without, and how an attempt or a pair's meeting fails here.

A member is suspected when it was lost, or when what it sent was refused. A suspicion counts for one attempt: it is
forgotten when an attempt begins, or after EXPIRY seconds if none does. A member that has been started again since, or
that merely refused a connection, is let in earlier: after 1, 2, 4, ... seconds for each suspicion since it last took
part in a round to the end. A member that keeps the others waiting round after round, without ever taking part to the
end, is left out for longer each time.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pier_node.config.run import SITES

NOBODY = ""


class Suspicion(Exception):
    """An attempt cannot continue because a member was lost, or sent something refused; `node` may be NOBODY.

    Attributes:
        mute: the member is there but kept the others waiting until they ran out of patience.
        told: if nobody is suspected: who gave up or refused what we sent, and whom that member blames.
    """

    def __init__(self, node: str, reason: str, mute: bool = False, told: Collection[str] = ()) -> None:
        super().__init__(f"{node}: {reason}" if node else reason)
        self.node, self.reason, self.mute, self.told = node, reason, mute, told


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
class _Past:
    """What a site has done since it last took part in a round to its end.

    Attributes:
        doubts: how often it was suspected.
        mute: in how many rounds it kept others waiting; `last` is the last of them.
        until: when it is let in again after that, in seconds of the loop's clock.
    """

    doubts: int = 0
    mute: int = 0
    last: int = 0
    until: float = 0.0


@dataclass(frozen=True)
class _Doubt:
    """One suspicion; times are seconds of the loop's clock.

    Attributes:
        earliest: when the site is let in if it has been started again since.
        until: when it is let in anyway.
    """

    since: float
    earliest: float
    until: float


class Involved:
    """Who had a part in the failed attempts at a round, in which an honest member may have been the first to notice.

    A single failure proves nothing against those who tell of it. But whoever makes one attempt after another fail, by
    giving up or refusing, has a part in each of them, while those it accuses or makes give up may change.
    """

    def __init__(self) -> None:
        self._parts: Counter[str] = Counter()

    def add(self, suspicion: Suspicion, group: Collection[str]) -> set[str]:
        """Note a failed attempt of this group, without the site itself. Returns whom the next should do without."""
        found = {suspicion.node, *suspicion.told} & {*group}
        self._parts.update(found)
        if suspicion.node:
            return found & {suspicion.node}
        most = max(self._parts.values(), default=0)
        return {node for node in self._parts if self._parts[node] == most} & {*group} if most > 1 else set()


class Suspects:
    """One member's suspicions in a round: at most as many as a run has sites, since strangers come under any name.

    Args:
        started_at: when a site was last started again, in seconds of the loop's clock.
    """

    def __init__(self, started_at: Callable[[str], float] = lambda _: -math.inf) -> None:
        self._started_at = started_at
        self._doubts: dict[str, _Doubt] = {}
        self._past: dict[str, _Past] = {}

    def add(self, node: str, mute_in: int = 0, refused: bool = False, since: float = math.inf) -> None:
        """Suspect a member from now on.

        Args:
            mute_in: the round in which it kept the others waiting.
            refused: it could not be reached at all, as a site that is being started.
            since: when that began for which it is suspected, in seconds of the loop's clock; inf: now. If it has been
                started again after that, its new process is not to blame.
        """
        now = asyncio.get_running_loop().time()
        past = self._past.setdefault(node, _Past())
        past.doubts += 1
        if mute_in > past.last:
            past.mute, past.last = past.mute + 1, mute_in
            past.until = now + min(EXPIRY * 2 ** (past.mute - 1), LONGEST) if past.mute > 1 else now
        if len(self._past) > SITES:
            del self._past[min(self._past, key=lambda name: (self._past[name].mute, self._past[name].last))]
        self._doubts = {name: doubt for name, doubt in self._doubts.items() if doubt.until > now}
        earliest = now + min(2.0 ** min(past.doubts - 1, 10), EXPIRY)
        self._doubts[node] = _Doubt(min(since, now), earliest, earliest if refused else now + EXPIRY)
        if len(self._doubts) > SITES:
            del self._doubts[min(self._doubts, key=lambda name: self._doubts[name].until)]

    def now(self) -> set[str]:
        """Nodes under suspicion now."""
        return {node for node, doubt in self._doubts.items() if self._holds(node, doubt)} | self.left_out()

    def _holds(self, node: str, doubt: _Doubt) -> bool:
        now = asyncio.get_running_loop().time()
        return now < (doubt.earliest if self._started_at(node) > doubt.since else doubt.until)

    def left_out(self) -> set[str]:
        """Nodes that are left out because they kept others waiting again and again."""
        now = asyncio.get_running_loop().time()
        return {node for node, past in self._past.items() if past.until > now}

    def clear(self) -> None:
        """Forget all suspicions of one attempt."""
        self._doubts.clear()

    def forgive(self, members: Iterable[str]) -> None:
        """Forgive these members: they took part in a round to its end."""
        for node in members:
            self._past.pop(node, None)


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
