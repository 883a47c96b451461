"""The end of a run at a site: stay until nobody alive needs its last state any more."""

from __future__ import annotations

import asyncio
import logging

from pier.v1.peer_pb2 import Phase, Pulse
from pier_node.config import RunConfig
from pier_node.outer.schedule import total_rounds
from pier_node.roster import Roster

LINGER = 120.0
"""Seconds that a finished site waits for others that still need its last state."""

log = logging.getLogger(__name__)


async def linger(config: RunConfig, roster: Roster) -> None:
    """Return once all live sites are done, or after LINGER seconds."""
    last, piped = total_rounds(config), config.pipeline.stages > 1

    def unfinished(pulse: Pulse) -> bool:
        return pulse.phase not in (Phase.PHASE_DONE, Phase.PHASE_LEAVING) if piped else pulse.round < last

    def needed() -> bool:
        pulses = [roster.pulse_of(node) for node in roster.contacts if roster.alive(node)]
        return any(pulse is not None and unfinished(pulse) for pulse in pulses)

    try:
        async with asyncio.timeout(LINGER):
            await roster.changed.until(lambda: not needed())
    except TimeoutError:
        log.warning("some sites have not finished; they can go on from the checkpoints of those that have")
