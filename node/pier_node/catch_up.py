"""Catching up: the newest state from sites that have gone on without this one, for as long as it takes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from pier_node.arrival import Arrival
from pier_node.faults import Faults
from pier_node.outer.claims import Trust
from pier_node.outer.deadline import Backoff
from pier_node.roster import Roster
from pier_node.wire.carrier import Carrier, PeerLost
from pier_node.wire.transfer import SILENCE, Fetched, Tries, fetch_state

log = logging.getLogger(__name__)


class CatchUp:
    """Fetches states of `length` parameters."""

    def __init__(self, carrier: Carrier, roster: Roster, faults: Faults, length: int) -> None:
        self._carrier, self._roster, self._faults, self._length = carrier, roster, faults, length

    async def newest(
        self, leaders: Callable[[], list[str]], moments: bool, trust: Callable[[], Trust] | None = None
    ) -> Fetched | None:
        """The state of the first of the leaders; None once there are none.

        Args:
            leaders: live peers whose states this site should go on from, as things are now.
            moments: fetch somebody's moments of AdamW with it.
            trust: what this site believes; None: of runs whose sites meet in pairs, each has a state of its own.
        """
        backoff, tries, told = Backoff(), Tries(), ""
        while peers := tries.order(leaders()):
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
        others = len(peers) > 1 or trust is None  # of runs in pairs `leaders` names another one each time
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
