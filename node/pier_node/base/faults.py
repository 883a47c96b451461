"""Named points of a round at which a test makes a node fail: `fail_at(node, round, phase)`.

A daemon takes them from the hidden flag `--fail-at ROUND:PHASE`, and ends itself there with SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

PHASES = ("ready", "exchanging", "staged", "journaled", "voting", "committed", "saved", "fetching")
"""In the order of a round; `exchanging` is in the middle of the data, `voting` after the first of the votes is out."""
PAIR_PHASES = ("ready", "met", "exchanging", "staged", "journaled", "voting", "committed", "saved", "fetching")
"""Of a pair's: only the one with the higher id writes its yes down; the decider has it in `voting`, and answers after
`saved`."""
PIPELINE_PHASES = ("routed", "forward", "backward", "averaging", "summed", "prepared")
"""Of an attempt of a pipeline, before the phases of the round that decides about it. An outer round of replicas has no
microbatches, and is `exchanging` before it is `summed`."""


class Faults:
    """Calls `strike` when a phase of a round is reached."""

    def __init__(self, strike: Callable[[int, str], Awaitable[None]] | None = None) -> None:
        self._strike = strike

    async def reach(self, round: int, phase: str) -> None:
        """The node is at this point."""
        if self._strike:
            await self._strike(round, phase)

    def within(self, phase: str) -> Faults:
        """For what is a part of another phase: all that it reaches has that one's name."""
        return Faults(lambda round, _: self.reach(round, phase))


NO_FAULTS = Faults()


def kill_at(point: str) -> Faults:
    """ROUND:PHASE -> faults that end this process at that phase of that round, or of the first later one it gets to.

    Raises ValueError for a point that does not exist.
    """
    number, _, phase = point.partition(":")
    known = dict.fromkeys(PHASES + PAIR_PHASES + PIPELINE_PHASES)
    if not number.isdigit() or phase not in known:
        raise ValueError(f"{point!r} is not ROUND:PHASE with a phase of {', '.join(known)}")

    async def strike(round: int, reached: str) -> None:
        if round >= int(number) and reached == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    return Faults(strike)
