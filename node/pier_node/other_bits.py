"""Atomic rounds leave all with the same bits: a site that hears that another holds other bits says so."""

from __future__ import annotations

import logging

from pier_node.outer.state import OuterState
from pier_node.roster import Roster

log = logging.getLogger(__name__)


def report_other_bits(roster: Roster, state: OuterState) -> None:
    """Log as an error who says that it holds other bits after the same round; called once a round.

    It stops nothing: a pulse is a claim, which any site can make, and only signed votes prove another history.
    """
    for node, pulse in roster.participants().items():
        if pulse.round == state.round and pulse.digest != state.digest:
            theirs, ours = pulse.digest.hex()[:12], state.digest.hex()[:12]
            log.error(
                "round %d: %s says that it holds other bits than this site: %s there, %s here",
                *(state.round, node, theirs, ours),
            )
