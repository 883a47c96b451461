"""How an attempt, or a pair's meeting, ends without a result here."""

from __future__ import annotations

from collections.abc import Collection

NOBODY = ""


class Suspicion(Exception):
    """It cannot go on because of a member: lost, or refused for what it sent; `node` may be NOBODY."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}" if node else reason)
        self.node = node
        self.reason = reason


class Behind(Exception):
    """The round was decided without us: catch up from `peers`."""

    def __init__(self, peers: Collection[str]) -> None:
        super().__init__(", ".join(peers))
        self.peers = tuple(peers)
