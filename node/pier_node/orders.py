"""What the run's operator wants of this site: to train, or to pause. Taken up between two rounds."""

from __future__ import annotations

import logging

from pier.v1.peer_pb2 import Phase
from pier_node.progress import Progress
from pier_node.roster import Roster
from pier_node.signals import Signal

log = logging.getLogger(__name__)


class Orders:
    """The order in force. `changed` is notified when there is another one.

    Attributes:
        epoch: grows with every order; 0: there was none.
        paused: the site shall not begin another round.
        assignment: what it trains: "replica", the whole model together with the others.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.paused = False
        self.assignment = "replica"
        self.changed = Signal()

    def take(self, epoch: int, paused: bool, assignment: str) -> None:
        """This holds from now on, unless a later one is known already."""
        if epoch >= self.epoch:
            self.epoch, self.paused, self.assignment = epoch, paused, assignment
            self.changed.notify()

    async def resumed(self, progress: Progress, roster: Roster) -> None:
        """Return once the site may train; the others do not wait for it meanwhile."""
        progress.phase = Phase.PHASE_PAUSED
        log.info("paused by the run's operator")
        await roster.announce()
        await self.changed.until(lambda: not self.paused)
        progress.phase = Phase.PHASE_WAITING
        log.info("going on")
