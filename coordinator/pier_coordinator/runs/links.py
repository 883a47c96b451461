"""The links between sites: how fast each was when it was last measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pier_coordinator.runs.series import rounded
from pier_coordinator.store.facts import number, text, whole

MOST_LINKS = 50_000
"""Maximum number of links kept; the least recently measured ones are dropped first."""

KEPT = ("node", "peer", "round_trip", "bandwidth", "bytes_sent")


class Links:
    """The newest measurement of each link, from a node to a peer."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], dict[str, Any]] = {}
        self._uplinks: dict[str, dict[str, float]] = {}
        self._revoked: set[str] = set()

    def __len__(self) -> int:
        return len(self._links)

    def take(self, node: str, body: Mapping[str, Any], stamp: int) -> None:
        """Take in the measurement of a link from `node` to the peer named in the fact's body."""
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
        """Drop the links of a revoked site and ignore all later measurements of them."""
        self._revoked.add(node)
        for ends in [ends for ends in self._links if node in ends]:
            self._drop(*ends)

    def kept(self) -> list[list[Any]]:
        """The rows, for a snapshot of the board: the least recently measured first."""
        return [[link[key] for key in KEPT] for link in self._links.values()]

    def restore(self, rows: Iterable[list[Any]], stamp: int) -> None:
        """Take in rows that `kept` gave."""
        for row in rows:
            body = dict(zip(KEPT, row, strict=True))
            self.take(body["node"], body, stamp)

    def _drop(self, node: str, peer: str) -> None:
        del self._links[node, peer]
        self._uplinks.get(node, {}).pop(peer, None)

    def uplink(self, node: str) -> float | None:
        """A site's greatest measured bandwidth to any peer, in bytes per second; None: not measured."""
        return max(self._uplinks.get(node, {}).values(), default=None)

    def rows(self, since: int = 0, node: str | None = None, most: int = MOST_LINKS) -> list[dict[str, Any]]:
        """At most `most` links that were measured after a stamp; with `node`, only those that begin or end there."""
        chosen = (
            link
            for link in self._links.values()
            if link["stamp"] > since and node in (None, link["node"], link["peer"])
        )
        return [link for link, _ in zip(chosen, range(most))]
