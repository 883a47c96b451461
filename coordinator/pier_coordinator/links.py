"""What was last measured on the way from one site to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pier_coordinator.fields import number, text, whole
from pier_coordinator.series import rounded

MOST_LINKS = 50_000
"""Links that are remembered; those heard of least recently go first."""


class Links:
    """The newest measurement of each (node, peer)."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], dict[str, Any]] = {}
        self._uplinks: dict[str, dict[str, float]] = {}
        self._revoked: set[str] = set()

    def __len__(self) -> int:
        return len(self._links)

    def take(self, node: str, body: Mapping[str, Any], stamp: int) -> None:
        """A link was measured, from `node` to the peer in the body of its fact."""
        peer = text(body, "peer")
        if not self._revoked.isdisjoint((node, peer)):
            return
        before = self._links.pop((node, peer), {})
        bandwidth = number(body, "bandwidth") or before.get("bandwidth")
        self._links[node, peer] = {
            "node": node,
            "peer": peer,
            "round_trip": rounded(number(body, "round_trip")),
            "bandwidth": rounded(bandwidth),
            "bytes_sent": whole(body, "bytes_sent"),
            "stamp": stamp,
        }
        if bandwidth:
            self._uplinks.setdefault(node, {})[peer] = bandwidth
        while len(self._links) > MOST_LINKS:
            self._drop(*next(iter(self._links)))

    def revoke(self, node: str) -> None:
        """A site is not of the run any more: forget its links, and hear of none again."""
        self._revoked.add(node)
        for ends in [ends for ends in self._links if node in ends]:
            self._drop(*ends)

    def _drop(self, node: str, peer: str) -> None:
        del self._links[node, peer]
        self._uplinks.get(node, {}).pop(peer, None)

    def uplink(self, node: str) -> float | None:
        """Bytes per second that a site has been seen to send, on its best way; None when nobody has measured it."""
        return max(self._uplinks.get(node, {}).values(), default=None)

    def rows(self, since: int = 0, node: str | None = None, most: int = MOST_LINKS) -> list[dict[str, Any]]:
        """Links that were measured after a stamp; with `node` only those that begin or end there."""
        chosen = (
            link
            for link in self._links.values()
            if link["stamp"] > since and node in (None, link["node"], link["peer"])
        )
        return [link for link, _ in zip(chosen, range(most))]
