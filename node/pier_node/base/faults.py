"""Faults: named points of a round at which a test makes a node fail: `fail_at(node, round, phase)`.

A daemon takes such a point from the hidden flag `--fail-at ROUND:PHASE`, and kills itself there with SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable

PHASES = ("ready", "exchanging", "staged", "journaled", "voting", "committed", "saved", "fetching")
"""Phases in the order of a round; `exchanging` is in the middle of the data, `voting` after the first vote is sent."""
PAIR_PHASES = ("ready", "met", "exchanging", "staged", "journaled", "voting", "committed", "saved", "fetching")
"""Phases of a pair's round. Only the member with the higher id writes its yes to disk; the decider receives it in
`voting`, and answers after `saved`."""
PIPELINE_PHASES = ("routed", "forward", "backward", "averaging", "summed", "prepared")
"""Phases of a pipeline's attempt, before those of the round that decides about it. An outer round of replicas has no
microbatches, and is `exchanging` before it is `summed`."""


class Faults:
    """Calls `strike` when a phase of a round is reached.

    Attributes:
        planned: whether any may happen.
    """

    def __init__(self, strike: Callable[[int, str], Awaitable[None]] | None = None) -> None:
        self._strike, self.planned = strike, strike is not None

    async def reach(self, round: int, phase: str) -> None:
        """Note that the node is at this point."""
        if self._strike:
            await self._strike(round, phase)

    def within(self, phase: str) -> Faults:
        """Faults for a part of another phase: whatever the part reaches has that phase's name."""
        return Faults(lambda round, _: self.reach(round, phase)) if self.planned else self


NO_FAULTS = Faults()


def kill_at(point: str) -> Faults:
    """Faults that end this process at ROUND:PHASE, or at that phase of the first later round that it reaches.

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
