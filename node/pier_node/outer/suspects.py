"""Whom the next attempt should do without: members that were lost, or refused for what they sent.

A suspicion counts for one attempt: it is forgotten when one begins, and after a while if none does. But a member that
lets the others wait in round after round, without ever taking part to the end, is left out for longer each time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping

EXPIRY = 30.0
"""Seconds; a few times what a member waits for the keeper's answer."""
LONGEST = 3600.0
"""Seconds for which a member that is mute again and again is left out at most."""
STANDSTILL = 30.0
"""Seconds in which a keeper has closed a group when all that are here wait for it."""


class Suspects:
    """One member's suspicions in a round."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._mute_in: dict[str, set[int]] = {}
        self._left_out: dict[str, float] = {}

    def add(self, node: str, mute_in: int = 0) -> None:
        """Suspect a member from now on.

        Args:
            mute_in: the round in which it kept the others waiting.
        """
        now = asyncio.get_running_loop().time()
        self._until[node] = now + EXPIRY
        rounds = self._mute_in.setdefault(node, set())
        if mute_in and mute_in not in rounds:
            rounds.add(mute_in)
            self._left_out[node] = now + min(EXPIRY * 2 ** (len(rounds) - 1), LONGEST) if len(rounds) > 1 else 0.0

    def now(self) -> set[str]:
        """Those under suspicion."""
        return _later(self._until) | self.left_out()

    def left_out(self) -> set[str]:
        """Those that let others wait again and again."""
        return _later(self._left_out)

    def clear(self) -> None:
        """Forget all suspicions of one attempt."""
        self._until.clear()

    def forgive(self, members: Iterable[str]) -> None:
        """These took part in a round to its end."""
        for node in members:
            self._mute_in.pop(node, None)
            self._left_out.pop(node, None)


def _later(times: Mapping[str, float]) -> set[str]:
    now = asyncio.get_running_loop().time()
    return {node for node, until in times.items() if until > now}


class Standstill:
    """How long a keeper has let all wait that are here."""

    def __init__(self) -> None:
        self._keeper, self._since = "", math.inf

    def too_long(self, keeper: str, all_wait: bool) -> bool:
        """Whether that goes on for longer than any reason of an honest keeper; told at each of its answers."""
        now = asyncio.get_running_loop().time()
        if not all_wait:
            self._since = math.inf
        elif keeper != self._keeper or self._since == math.inf:
            self._keeper, self._since = keeper, now
        return now - self._since > STANDSTILL
