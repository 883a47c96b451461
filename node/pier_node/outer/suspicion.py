"""How an attempt, or a pair's meeting, ends without a result here."""

from __future__ import annotations

from collections.abc import Collection

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
