"""Whom the next attempt should do without: members that were lost, or refused for what they sent.

A suspicion counts for one attempt: it is forgotten when one begins, and after a while if none does.
"""

from __future__ import annotations

import asyncio
import math

EXPIRY = 30.0
"""Seconds; a few times what a member waits for the keeper's answer."""


STANDSTILL = 30.0
"""Seconds in which a keeper has closed a group when all that are here wait for it."""


class Suspects:
    """One member's suspicions in a round."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, node: str) -> None:
        """Suspect a member from now on."""
        self._until[node] = asyncio.get_running_loop().time() + EXPIRY

    def now(self) -> set[str]:
        """Those under suspicion."""
        now = asyncio.get_running_loop().time()
        return {node for node, until in self._until.items() if until > now}

    def clear(self) -> None:
        """Forget all."""
        self._until.clear()


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
