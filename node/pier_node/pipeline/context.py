"""What the parts of a pipelined site share: its tools and measurements, and the position of the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.config.run import RunConfig
from pier_node.outer.times import Pace, Silence
from pier_node.pipeline.activation_codec import Formats
from pier_node.pipeline.vote_state import Turn, VoteState, turn_of, vote_state_of
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import Carrier
from pier_proto.v1.peer_pb2 import Phase

T = TypeVar("T")
log = logging.getLogger(__name__)
Rows = tuple[Tensor, Tensor]
"""Inputs and targets of a microbatch, [sequences, time] each."""


@dataclass
class Tools:
    """What attempts work with.

    Attributes:
        thread: runs the computation, one task after the other.
        rows: (step, index of the microbatch among the site's own) -> its inputs and targets; called only at stage 0, in
            the thread.
        open_data: opens the data so that `rows` is fast. It blocks, for minutes if text must be tokenized first.
        memory: number of microbatches in flight that the site can hold.
        founder: node id of the site that founded the run; empty: this site does not know.
        silence: learns how long the next tensor takes to arrive.
        patience: learns how long the other sites take to finish an iteration after this site has done its part.
        outer_patience: the same for outer rounds, whose means are over whole stages and take much longer.
        pace: learns how long tasks and transfers take.
        endless: learns the longest time that a computation takes.
    """

    carrier: Carrier
    roster: Roster
    thread: Executor
    rows: Callable[[int, int], Rows]
    memory: int
    formats: Formats
    faults: Faults = NO_FAULTS
    open_data: Callable[[], object] = lambda: None
    founder: str = ""

    def __post_init__(self) -> None:
        self.silence, self.pace = Silence(), Pace()
        # Shorter than the patience of the sites that wait for this one: a site whose computation hangs reports it
        # before others have to guess.
        self.endless = Silence(initial=100.0, floor=20.0)
        self._stuck: asyncio.Future[Any] | None = None
        self.patience, self.outer_patience = (Silence(initial=300.0, floor=60.0, few=8) for _ in range(2))

    async def prepare(self, stage: int) -> None:
        """Prepare what a stage needs before it computes.

        In the thread, for which a site that ends does not wait, and without a deadline: it may take hours.
        """
        if stage == 0:
            await asyncio.get_running_loop().run_in_executor(self.thread, self.open_data)

    @property
    def stuck(self) -> bool:
        """Whether a computation that timed out is still running."""
        return self._stuck is not None and not self._stuck.done()

    async def compute(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread. Raises Suspicion, of this site: it does not finish."""
        loop, patience = asyncio.get_running_loop(), self.endless.seconds()
        if self.stuck:
            raise Suspicion(self.carrier.node, "still computes what did not end before")
        began, computing = loop.time(), loop.run_in_executor(self.thread, work)
        try:
            await asyncio.wait([computing], timeout=patience)
        except asyncio.CancelledError:
            computing.cancel()  # work that has not begun need not be done
            raise
        if not computing.done():
            self.endless.late()
            self._stuck = computing
            raise Suspicion(self.carrier.node, f"has computed for {patience:.0f} s without an end")
        self.endless.saw(loop.time() - began)
        return computing.result()

    async def freed(self, progress: Progress) -> None:
        """Return once the hanging computation has ended, well or badly.

        Other sites continue without this one if they can.
        """
        progress.phase = Phase.PHASE_PAUSED
        await self.roster.announce()
        if self._stuck is not None:
            log.error("computing hangs: this site takes no part until it ends; if it never does, start the site again")
            await asyncio.wait([self._stuck])
            self._stuck = None  # it may hold much memory
            log.info("computing has ended: this site continues")


class Position:
    """The position of the run, as this site knows it."""

    def __init__(self, config: RunConfig, rounds: Rounds) -> None:
        self.config, self._rounds = config, rounds

    @property
    def coming(self) -> int:
        """The number of the next round."""
        return self._rounds.coming()

    @property
    def voted(self) -> VoteState:
        """The steps taken, and the versions that count."""
        return vote_state_of(self._rounds.state)

    @property
    def turn(self) -> Turn | None:
        """The kind of the next round; None: the run is over."""
        return turn_of(self.config, self.voted)
