"""What the run's operator wants of this site: to train, and what, or to pause. Taken up between two rounds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

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
        plan: names it.
        jobs: of this site, in their order.
        complete: nobody needs this site for the plan any more, once it has scored.
        scoring: to be done when no job is left; None: nothing.
        checkpoints: of its jobs, as the coordinator keeps them.
    """

    plan: str
    jobs: tuple[ExpertJob, ...]
    complete: bool
    scoring: ScoringOrder | None = None
    checkpoints: tuple[Kept, ...] = ()


class Orders:
    """The order in force. `changed` is notified when there is another one.

    Attributes:
        epoch: grows with every order; 0: there was none.
        paused: the site shall not begin another round.
        assignment: what it trains: "replica", the whole model together with the others; "expert", alone, from the model
            that the run ends with; "stage", a stage of a pipeline.
        experts: with the assignment "expert".
        stage: with the assignment "stage", its number; None: whichever the site that plans gives it.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.paused = False
        self.assignment = "replica"
        self.experts: Experts | None = None
        self.stage: int | None = None
        self.changed = Signal()

    def take(
        self, epoch: int, paused: bool, assignment: str, experts: Experts | None = None, stage: int | None = None
    ) -> None:
        """This holds from now on, unless a later one is known already."""
        if epoch >= self.epoch:
            self.epoch, self.paused, self.assignment = epoch, paused, assignment
            self.experts, self.stage = experts, stage
            self.changed.notify()

    async def resumed(self, progress: Progress, roster: Roster) -> None:
        """Return once the site may train; the others do not wait for it meanwhile."""
        progress.phase = Phase.PHASE_PAUSED
        log.info("paused by the run's operator")
        await roster.announce()
        await self.changed.until(lambda: not self.paused)
        progress.phase = Phase.PHASE_WAITING
        log.info("going on")
