"""Atomic rounds leave all with the same bits: a site that sees that most others hold others stops and says so."""

from __future__ import annotations

import logging

from pier_node.errors import PierError
from pier_node.outer.quorum import has_quorum
from pier_node.outer.state import OuterState
from pier_node.roster import Roster

log = logging.getLogger(__name__)


def assert_agreement(roster: Roster, state: OuterState) -> None:
    """Compare with what the others say they hold after the same round.

    Raises:
        PierError: so many members of the round hold other bits that they could go on without this site. Fewer, or
            others, cannot have them by any vote that was cast: they are named in the log, and this site goes on.
    """
    pulses = roster.participants()
    others = [node for node, pulse in pulses.items() if pulse.round == state.round and pulse.digest != state.digest]
    problems = [
        f"round {state.round}: {node} says that it holds other bits than this site: "
        f"{pulses[node].digest.hex()[:12]} there, {state.digest.hex()[:12]} here"
        for node in others
    ]
    for problem in problems:
        log.error("%s", problem)
    if has_quorum(others, state.members):
        raise PierError(problems[0], "This site must start again from an empty data directory; please report this.")
