"""The end of a run at a site: stay until nobody alive needs its last state any more, then say who will need it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from pier.v1.peer_pb2 import Phase, Pulse
from pier_node.config import RunConfig
from pier_node.outer.schedule import total_rounds
from pier_node.roster import Roster

LINGER = 120.0
"""Seconds that a finished site waits for others that still need its last state."""

log = logging.getLogger(__name__)


async def linger(config: RunConfig, roster: Roster) -> None:
    """Return once all live sites are done, or after LINGER seconds; say who is not."""
    last, piped = total_rounds(config), config.pipeline.stages > 1

    def unfinished(pulse: Pulse) -> bool:
        return pulse.phase not in (Phase.PHASE_DONE, Phase.PHASE_LEAVING) if piped else pulse.round < last

    def behind() -> list[str]:
        pulses = {node: roster.pulse_of(node) for node in roster.contacts}
        return sorted(node for node, pulse in pulses.items() if pulse is not None and unfinished(pulse))

    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            await roster.changed.until(lambda: not any(map(roster.alive, behind())))
    if left := behind():
        names = ", ".join(map(roster.called, left))
        log.warning(
            "not finished: %s. Once started again, they need this site's last state: start it as well, with the same "
            "command, and it hands it over",
            names,
        )
