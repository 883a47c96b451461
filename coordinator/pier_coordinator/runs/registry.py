"""The live sites: their leases, what each reported last, and a signal for a caller that waits for new orders.

The registry is in memory only; the database holds what must outlive the coordinator. After a restart of the
coordinator, sites continue with the leases they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pier_coordinator.store.facts import Fact, event
from pier_coordinator.store.refusals import Superseded, Unregistered
from pier_coordinator.store.rows import SiteRow
from pier_proto.v1.coordinator_pb2 import Paths
from pier_proto.v1.peer_pb2 import Phase, Pulse

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
    """The sites that have a lease, live or expired.

    Args:
        clock: a monotonic clock, in seconds.
        wall: returns the time in seconds since the epoch, for events.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
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
        for presence in over:
            presence.alive = False
        return [self._silence(presence) for presence in over]

    def _silence(self, presence: Presence) -> Fact:
        if presence.pulse is not None and presence.pulse.phase in _ENDING:
            return event(self._wall(), f"{presence.name} has left", presence.node)
        return event(self._wall(), f"{presence.name} is silent for {LEASE_SECONDS:.0f} s", presence.node, level=30)
