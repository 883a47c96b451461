"""The loop of a site, for every kind of run: one unit of work after another, until there is none.

What a unit is differs: a round of a replica (training.py), an iteration of a pipeline (pipeline_training.py), an expert
(experts.py). What the operator orders, and what to do when left behind, is the same for all.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.site.orders import Orders
from pier_proto.v1.peer_pb2 import Phase


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
