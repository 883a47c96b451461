"""Catching up: fetch the newest state from sites that are ahead of this one, retrying for as long as it takes.

On a slow link a state takes minutes or hours, so the log says how much of it has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from pier_node.base.faults import Faults
from pier_node.base.units import age, amount, rate
from pier_node.outer.deadline import Backoff
from pier_node.rounds.fetch import SILENCE, Fetched, Tries, fetch_state
from pier_node.rounds.progress_checks import Trust
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import Carrier, PeerLost

EVERY = 15.0
"""Seconds between two lines in the log."""

log = logging.getLogger(__name__)


class Arrival:
    """Logs a fetch's progress; it is called after every piece with the bytes that are here and the bytes in all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._told = clock()
        self._before: int | None = None  # bytes that were here before a peer was lost

    def __call__(self, arrived: int, total: int) -> None:
        """Log the progress now and then."""
        now = self._clock()
        if self._before is None:
            self._began, self._before = now, arrived
        if now - self._told < EVERY or arrived == total or now == self._began:
            return
        self._told, speed = now, (arrived - self._before) / (now - self._began)
        left = f", {age((total - arrived) / speed)} left" if speed else ""
        log.info("%s of %s of the run's state are here, at %s%s", amount(arrived), amount(total), rate(speed), left)


class CatchUp:
    """Fetches states of `length` parameters."""

    def __init__(self, carrier: Carrier, roster: Roster, faults: Faults, length: int) -> None:
        self._carrier, self._roster, self._faults, self._length = carrier, roster, faults, length

    async def newest(
        self, sources: Callable[[], list[str]], moments: bool, trust: Callable[[], Trust] | None = None
    ) -> Fetched | None:
        """Fetch the state of the first source; None once there are no sources.

        Args:
            sources: returns the live peers whose states this site should continue from, as of now.
            moments: whether to fetch some site's AdamW moments with it.
            trust: returns what this site trusts; None in runs whose sites meet in pairs, where each has its own state.
        """
        backoff, tries, told = Backoff(), Tries(), ""
        while peers := tries.order(sources()):
            try:
                return await self._fetch(peers, moments, tries, trust() if trust else None)
            except PeerLost as lost:
                if lost.reason != told:
                    log.warning("cannot catch up yet: %s", lost.reason)
                told = lost.reason
                await asyncio.sleep(backoff.seconds())
        return None

    async def _fetch(self, peers: list[str], moments: bool, tries: Tries, trust: Trust | None) -> Fetched:
        pulse = self._roster.pulse_of(peers[0])
        if pulse is None:
            raise PeerLost(peers[0], "nobody who is ahead answers")
        await self._faults.reach(pulse.round, "fetching")
        others = len(peers) > 1 or trust is None  # in runs of pairs, `sources` names a different peer each time
        async with tries.another(peers[0]) as patience:
            return await fetch_state(
                self._carrier,
                peers,
                length=self._length,
                timeout=SILENCE,
                round=0 if trust else pulse.round,
                digest=None if trust else pulse.digest,
                trust=trust,
                moments=moments,
                patience=patience if others else math.inf,
                partial=tries.partial,
                progress=Arrival(),
            )
