"""A process of a site in virtual time: what it starts, it takes with it when the power goes."""

from __future__ import annotations

import asyncio
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from simulation.disk import Disk

from pier_node.gossip.pair_rounds import PairRounds
from pier_node.rounds.member import Rounds
from pier_node.site.loop import Orders

if TYPE_CHECKING:
    from simulation.doubles import HuntDaemon, HuntWorkers
    from simulation.wire import HuntCarrier
    from simulation.world import World

    from pier_node.site.training import Training

HERE: ContextVar[Process | None] = ContextVar("HERE", default=None)
"""Whose the present code is; None: nobody's, it is the test's."""


@dataclass(eq=False)
class Process:
    """From a start of the daemon to its end.

    Attributes:
        dead: its memory is gone; tasks that still unwind do so without network and disk, and nobody hears of them.
        finished: it has said that the run is finished.
        error: what it ended with.
    """

    world: World
    site: str
    number: int
    disk: Disk
    dead: bool = False
    stopping: bool = False
    finished: bool = False
    error: BaseException | None = None
    tasks: dict[SiteTask, None] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)
    daemon: HuntDaemon | None = None
    carrier: HuntCarrier | None = None
    trainer: HuntWorkers | None = None
    training: Training | None = None
    rounds: Rounds | None = None
    pairs: PairRounds | None = None
    adopted: bool = False
    """In a run of pairs: it has gone on from another's state."""

    def say(self, text: str) -> None:
        """What a user reads."""
        self.world.note(self.site, text.strip().splitlines()[0])
        self.finished |= text.startswith("The run is finished")

    def forget(self, task: asyncio.Task[Any]) -> None:
        """A task has ended."""
        self.tasks.pop(cast(SiteTask, task), None)

    def end(self) -> None:
        """The process is gone, and all that it had in memory."""
        self.dead = self.disk.gone = True
        if self.carrier:
            self.carrier.die()
        for task in [*self.tasks]:
            task.cancel()


class SiteTask(asyncio.Task[Any]):
    """A task that knows whose it is."""

    here: Process | None = None


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None) -> SiteTask:
    """The loop's task factory."""
    task = SiteTask(coroutine, loop=loop, context=context)
    here = task.here = HERE.get() if context is None else context.get(HERE)
    if here is not None:
        here.tasks[task] = None
        task.add_done_callback(here.forget)
        if here.dead:
            task.cancel()
    return task


def this_process() -> Process:
    """Whose the present code is."""
    here = HERE.get()
    assert here is not None
    return here
