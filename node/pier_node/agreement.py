"""Atomic rounds leave all with the same bits: whoever sees otherwise stops and says so."""

from __future__ import annotations

from pier_node.errors import PierError
from pier_node.outer.state import OuterState
from pier_node.roster import Roster


def assert_agreement(roster: Roster, state: OuterState) -> None:
    """Raise PierError if another site says that it holds other bits after the same round."""
    for node in roster.participants():
        pulse = roster.pulse_of(node)
        if pulse and pulse.round == state.round and pulse.digest != state.digest:
            raise PierError(
                f"round {state.round}: {node} holds other bits than this site: {pulse.digest.hex()[:12]} there, "
                f"{state.digest.hex()[:12]} here",
                "One of the two must start again from an empty data directory; please report this.",
            )
