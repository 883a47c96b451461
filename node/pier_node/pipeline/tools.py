"""What the attempts of a site work with, from one to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from pier_node.faults import NO_FAULTS, Faults
from pier_node.pipeline.times import Pace, Silence
from pier_node.roster import Roster
from pier_node.wire.carrier import Carrier, PeerLost

T = TypeVar("T")
Rows = tuple[Tensor, Tensor]
"""Inputs and targets of a microbatch, [sequences, time] each."""


@dataclass
class Tools:
    """What attempts work with.

    Attributes:
        thread: does the computing, one thing after the other.
        rows: (step, microbatch's place among the site's own) -> what it is made of; only stage 0 asks, in the thread.
        memory: microbatches in flight that the site can hold.
        shape: of every tensor that travels.
        silence: learns how long one waits for the next tensor.
        patience: learns how long the others take for the rest of an iteration, once this site has done its part.
        outer_patience: the same of outer rounds, whose means are of whole stages and take much longer.
        pace: learns how long tasks and transfers take.
    """

    carrier: Carrier
    roster: Roster
    thread: Executor
    rows: Callable[[int, int], Rows]
    memory: int
    shape: tuple[int, int, int]
    faults: Faults = NO_FAULTS

    def __post_init__(self) -> None:
        self.silence, self.pace = Silence(), Pace()
        self.patience, self.outer_patience = (Silence(initial=300.0, floor=60.0, few=8) for _ in range(2))

    async def compute(self, work: Callable[[], T]) -> T:
        """Do it in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)


async def holders(tools: Tools, stage: int, version: int, patience: float) -> list[str]:
    """Live peers that have a version of a stage: what sites say of themselves is a moment old.

    Raises PeerLost: there were none for so many seconds.
    """

    def found() -> list[str]:
        places = {node: it.place for node, it in tools.roster.pulses().items() if it.HasField("place")}
        has = [node for node, it in places.items() if it.stage == stage and it.version == version]
        return [node for node in has if node != tools.carrier.node]

    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            await tools.roster.changed.until(lambda: bool(found()))
    if not (peers := found()):
        raise PeerLost("", f"no site that has stage {stage} like that is here")
    return peers
