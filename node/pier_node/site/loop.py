"""The loop of a site, for every kind of run: one unit of work after another, until there is none; and its orders.

What a unit is differs: a round of a replica (training.py), an iteration of a pipeline (pipeline_training.py), an expert
(experts.py). What the operator orders, which takes effect between two units, and what to do when left behind,
is the same for all.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from pier_node.base.tasks import Signal
from pier_node.experts.job import ExpertJob
from pier_node.experts.resume import Kept
from pier_node.experts.sheet import ScoringOrder
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_proto.v1.peer_pb2 import Phase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experts:
    """The assignment of kind "expert".

    Attributes:
        plan: id of the plan.
        jobs: the jobs of this site, in order.
        complete: the plan no longer needs this site, once it has finished scoring.
        scoring: to be done when no job is left; None: nothing.
        checkpoints: the checkpoints of its jobs that the coordinator keeps.
    """

    plan: str
    jobs: tuple[ExpertJob, ...]
    complete: bool
    scoring: ScoringOrder | None = None
    checkpoints: tuple[Kept, ...] = ()


class Orders:
    """The order in force. `changed` is notified of each new order.

    Attributes:
        epoch: grows with every order; 0: there was none.
        paused: the site must not begin another round.
        experts: what it trains alone, from the run's final model; None: only the run's model, with the other sites.
        stage: number of the stage of a pipeline that it trains; None: the planning site chooses it.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.paused = False
        self.experts: Experts | None = None
        self.stage: int | None = None
        self.changed = Signal()

    def take(self, epoch: int, paused: bool, experts: Experts | None = None, stage: int | None = None) -> None:
        """Put an order into force, unless a later one is already known."""
        if epoch >= self.epoch:
            self.epoch, self.paused, self.experts, self.stage = epoch, paused, experts, stage
            self.changed.notify()

    async def resumed(self, progress: Progress, roster: Roster) -> None:
        """Return once the site may train. Meanwhile the other sites do not wait for it."""
        progress.phase = Phase.PHASE_PAUSED
        log.info("paused by the run's operator")
        await roster.announce()
        await self.changed.until(lambda: not self.paused)
        progress.phase = Phase.PHASE_WAITING
        log.info("going on")


class Work(Protocol):
    """What a site does in a run; by default nothing. Each method raises PierError when the site cannot continue."""

    progress: Progress

    async def begin(self) -> None:
        """Get ready."""
        return

    def due(self) -> bool:
        """Whether there is more to do."""

    def behind(self) -> bool:
        """Whether other sites are ahead, so that this one must catch up first."""
        return False

    async def catch_up(self) -> None:
        """Continue from where the others are."""
        return

    async def step(self) -> None:
        """Do one unit of work."""

    async def rest(self) -> None:
        """Bring what is under way to its end, so that a pause loses nothing."""
        return

    async def finish(self) -> None:
        """Do what is left once nothing more is due."""
        return

    async def close(self) -> None:
        """End what is under way, whether or not the work is finished."""


async def run_work(work: Work, roster: Roster, orders: Orders) -> None:
    """Work until nothing more is due; pause when the operator says so. Raises PierError."""
    try:
        await work.begin()
        while work.due():
            if orders.paused:
                await work.rest()
                await orders.resumed(work.progress, roster)
            elif work.behind():
                await work.catch_up()
            else:
                await work.step()
        await work.finish()
    except (Exception, asyncio.CancelledError):  # not `finally`: nothing can be awaited during a GeneratorExit
        await work.close()
        raise
    await work.close()
    work.progress.phase = Phase.PHASE_DONE
