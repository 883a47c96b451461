"""The sites of a run: their rows on the board, the links between them, and the live ones with their leases.

The registry is in memory only; the database holds what must outlive the coordinator. After a restart of the
coordinator, sites continue with the leases they have. A caller can wait for new orders of its site.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from pier_coordinator.runs.series import Series, rounded
from pier_coordinator.runs.timings import Segments
from pier_coordinator.store.facts import Fact, event, number, text, whole
from pier_coordinator.store.sites import SiteRow, Superseded, Unregistered
from pier_proto.v1.coordinator_pb2 import Paths
from pier_proto.v1.peer_pb2 import Phase, Pulse

SITE_POINTS = 240
"""Maximum number of points of each curve of a site."""

LINES = 50
"""Lines of a site's log that are kept."""

SILENT_AFTER = 60.0
"""Seconds after which a site that never sent a pulse counts as silent: the time of six samples."""

LIVE = ("inner_step", "tokens", "tokens_per_second", "loss", "validation_loss", "bytes_sent", "utilisation", "memory")
IF_TOLD = ("device_memory", "mfu", "cpu", "gradient_norm")
"""Numbers of a sample that are not known if they are 0."""
CURVES = ("loss", "gradient_norm", "tokens_per_second", "utilisation")
"""Numbers of a sample that have a curve."""
CARD = ("name", "activity", "assignment", "address", "transport", "version", "workers", "device")
"""What seldom changes of a site."""
REVOKED = "revoked"
GONE = ("done", "leaving", "left", REVOKED)
IDLE = ("silent", "paused", "starting", "catching up", *GONE)
"""States of a site that does not train, whatever speed it reported last."""


@dataclass
class Site:
    """A site; numbers that are not known are None.

    Attributes:
        stamp: stamp of its last change.
        lasting: stamp of the last change of what seldom changes: its name, its address, its orders.
        alive: as of its last pulse; None before the first one.
        heard: when something last arrived from it, in seconds since the epoch by the coordinator's clock.
        offset: seconds by which its clock is ahead of the coordinator's.
        dropped: number of records that it lost because it could not deliver them for too long.
        lines: the last lines of its log: when, level as of Python's logging, text.
        first_memory: memory in its first sample since it registered, in bytes.
        told: how far its facts, not its pulses, say that it has come: inner step, tokens, round.
    """

    node: str
    name: str
    stamp: int = 0
    lasting: int = 0
    address: str = ""
    transport: str = ""
    version: str = ""
    workers: int | None = None
    alive: bool | None = None
    phase: str = ""
    round: int = 0
    heard: float = 0.0
    offset: float | None = None
    dropped: int = 0
    activity: str = ""
    assignment: str = ""
    ending: str = ""
    memory: float | None = None
    first_memory: float | None = None
    inner_step: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    validation_loss: float | None = None
    utilisation: float | None = None
    bytes_sent: float | None = None
    device: str = ""
    device_memory: float | None = None
    mfu: float | None = None
    cpu: float | None = None
    gradient_norm: float | None = None
    shown: str = ""
    told: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Series] = field(
        default_factory=lambda: {name: Series(SITE_POINTS) for name in (*CURVES, "validation_loss")}
    )
    segments: Segments = field(default_factory=Segments)
    lines: deque[tuple[float, int, str]] = field(default_factory=lambda: deque(maxlen=LINES))

    def kept(self) -> dict[str, Any]:
        """What facts have told of it, for a snapshot of the board."""
        return {
            **{key: getattr(self, key) for key in PLAIN},
            "curves": {name: curve.kept() for name, curve in self.curves.items()},
            "segments": self.segments.kept(),
            "lines": list(self.lines),
        }

    @classmethod
    def restored(cls, kept: Mapping[str, Any], stamp: int) -> Self:
        """The site of which `kept` was kept; `stamp` is that of this change."""
        site = cls(**{key: kept[key] for key in PLAIN if key in kept}, stamp=stamp, lasting=stamp)
        for name, curve in kept["curves"].items():
            site.curves[name] = Series.restored(SITE_POINTS, curve, stamp)
        site.segments = Segments.restored(kept["segments"])
        site.lines.extend((when, level, line) for when, level, line in kept["lines"])
        return site

    def registered(self, body: Mapping[str, Any]) -> None:
        """Take in its registration: it has started."""
        self.name = text(body, "name")[:64] or self.name
        self.address, self.transport, self.version = (text(body, key) for key in ("address", "transport", "version"))
        self.workers = whole(body, "workers")
        self.phase, self.ending, self.first_memory = "starting", "", None

    def measured(self, body: Mapping[str, Any]) -> None:
        """Take in the numbers of a sample or a pulse; those that are missing stay as they are."""
        for key in LIVE:
            if key in body:
                setattr(self, key, number(body, key))
        for key in IF_TOLD:
            if key in body:
                setattr(self, key, number(body, key) or None)
        self.device = text(body, "device")[:200] or self.device
        self.dropped = max(self.dropped, whole(body, "dropped") or 0)
        self.first_memory = self.first_memory or self.memory

    @property
    def speed(self) -> float | None:
        """Tokens per second, 0 if it was idle when its state was last updated; None: never reported."""
        return 0.0 if self.tokens_per_second is not None and self.shown in IDLE else self.tokens_per_second

    def state(self, now: float, started: float, rounds: int) -> str:
        """Its state in a word: its phase, or why it has none."""
        if self.ending:
            return self.ending
        finished = self.phase in GONE or (rounds > 0 and self.round >= rounds)
        quiet = now - max(self.heard, started) > SILENT_AFTER if self.alive is None else not self.alive
        if quiet:
            return ("left" if self.phase == "leaving" else "done") if finished else "silent"
        return self.phase or "training"

    def lag(self, top: int) -> int:
        """Rounds behind the newest round of any site; 0 if it has ended."""
        return 0 if self.ending else max(0, top - self.round)

    def row(self, top: int, uplink: float | None, since: int = 0) -> dict[str, Any]:
        """The row for JSON; `top` is the newest round of any site.

        What seldom changes is left out if it has not changed since the stamp `since`.
        """
        return {
            "node": self.node,
            **({key: getattr(self, key) for key in CARD} if self.lasting >= since else {}),
            "state": self.shown,
            "round": self.round,
            "lag": self.lag(top),
            **{key: rounded(getattr(self, key)) for key in LIVE if key not in ("tokens", "bytes_sent", "memory")},
            "tokens_per_second": rounded(self.speed),
            **{key: getattr(self, key) for key in ("tokens", "bytes_sent", "memory")},
            **{key: rounded(getattr(self, key)) for key in IF_TOLD},
            "uplink": rounded(uplink),
            "heard": round(self.heard, 1),
        }


NOT_KEPT = ("stamp", "lasting", "alive", "offset", "shown", "curves", "segments", "lines")
PLAIN = tuple(each.name for each in fields(Site) if each.name not in NOT_KEPT)
"""Attributes that a snapshot keeps as they are. Those that only pulses tell are as after a start without one."""

LEASE_SECONDS = 15.0
HEARTBEAT_SECONDS = 1.0
_ENDING = (Phase.PHASE_LEAVING, Phase.PHASE_DONE)


@dataclass
class Presence:
    """A site that has a lease.

    Attributes:
        heard: when it last sent a heartbeat, by the registry's clock.
        alive: its lease has not expired.
        pulse: its last pulse; None: none yet.
        paths: the last paths that it planned for a pipeline, not parsed yet; None: none.
        offset: seconds by which its clock was ahead of ours at its last pulse, ignoring the message's travel time.
        follows: epoch of the order that it follows; 0: not known yet.
        changed: set and replaced when there is news for the caller that watches its orders.
        watches: number of the newest watch. A site has only one, otherwise it could use up all streams.
    """

    node: str
    name: str
    lease: bytes = field(repr=False)
    heard: float
    alive: bool
    pulse: Pulse | None = None
    paths: Paths | None = None
    offset: float | None = None
    follows: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watches: int = 0

    def watch(self) -> int:
        """Begin a watch, which replaces an earlier one; return its number."""
        self.watches += 1
        self.notify()
        return self.watches

    def notify(self) -> None:
        """Wake the watch."""
        news, self.changed = self.changed, asyncio.Event()
        news.set()


class Registry:
    """The sites that have a lease, live or expired. `clock` is monotonic; `wall`, for events, is since the epoch."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._present: dict[str, Presence] = {}

    def restore(self, sites: Iterable[SiteRow]) -> None:
        """Restore leases after a restart; the lease of a site that was live then starts again now."""
        for site in sites:
            if site.lease and site.revoked_at is None:
                self._present[site.node] = Presence(site.node, site.name, site.lease, self._clock(), not site.gone)

    def admit(self, site: SiteRow) -> None:
        """Give a registered site its lease; a holder of its last lease is notified.

        A site that was silent counts as back at its first heartbeat.
        """
        before = self._present.get(site.node)
        heard = before.heard if before and not before.alive else self._clock()
        alive = before is None or before.alive
        self._present[site.node] = Presence(site.node, site.name, site.lease, heard, alive)
        if before:
            before.notify()

    def remove(self, node: str) -> None:
        """Remove a revoked site."""
        if before := self._present.pop(node, None):
            before.notify()

    def get(self, node: str) -> Presence | None:
        """The site with this node id, if it has a lease."""
        return self._present.get(node)

    def is_here(self, node: str) -> bool:
        """Whether a site has a lease that has not expired."""
        presence = self.get(node)
        return presence is not None and presence.alive

    def holder(self, node: str, lease: bytes) -> Presence:
        """The site that holds this lease. Raises Unregistered, Superseded."""
        presence = self._present.get(node)
        if presence is None:
            raise Unregistered("this site has no lease: it must register")
        if presence.lease != lease:
            raise Superseded(
                "another start of this site has registered since: "
                "see that one data folder, or a copy of it, is not in use twice"
            )
        return presence

    def watched(self, node: str, lease: bytes, watch: int) -> asyncio.Event:
        """The event that a watch of a site waits for. Raises Unregistered, Superseded."""
        presence = self.holder(node, lease)
        if presence.watches != watch:
            raise Superseded("another call of this site watches its orders now")
        return presence.changed

    def beat(self, presence: Presence, pulse: Pulse, follows: int) -> Fact | None:
        """Take in a heartbeat; return the event that the site is back if it was silent."""
        now = self._clock()
        silent, presence.heard = now - presence.heard, now
        presence.pulse, presence.follows = pulse, follows
        presence.offset = pulse.time - self._wall() if pulse.time else None
        if presence.alive:
            return None
        presence.alive = True
        return event(self._wall(), f"{presence.name} is back after {silent:.0f} s", presence.node)

    def expire(self) -> list[Fact]:
        """An event for each site whose lease has expired since the last call."""
        now = self._clock()
        over = [each for each in self._present.values() if each.alive and now - each.heard >= LEASE_SECONDS]
        events = list[Fact]()
        for presence in over:
            presence.alive = False
            left = presence.pulse is not None and presence.pulse.phase in _ENDING
            said = "has left" if left else f"is silent for {LEASE_SECONDS:.0f} s"
            level, state = (20, "left") if left else (30, "silent")
            events.append(event(self._wall(), f"{presence.name} {said}", presence.node, level, state))
        return events


MOST_LINKS = 50_000
"""Maximum number of links kept; the least recently measured ones are dropped first."""

KEPT = ("node", "peer", "round_trip", "bandwidth", "bytes_sent")


class Links:
    """The newest measurement of each link, from a node to a peer: how fast it was."""

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
