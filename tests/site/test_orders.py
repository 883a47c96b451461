"""What an operator orders is taken up between two rounds."""

from __future__ import annotations

import asyncio
from typing import Any

from simulation.training_cases import Roster, Rounds, Site, begin, local
from simulation.virtual_time import run

from pier_node.rounds.progress import Progress
from pier_node.site.loop import Orders
from pier_proto.v1.peer_pb2 import Phase


class Crowd(Roster):
    told = 0

    async def announce(self) -> None:
        self.told += 1


def test_a_paused_site_begins_no_other_round_until_it_may() -> None:
    site = Site(local(3), Rounds(begin()), Crowd())
    orders = site.orders
    seen: list[Any] = []

    async def save(checkpoint: Any) -> None:
        seen.append(checkpoint.state.round)

    async def train(**job: Any) -> Any:
        if not site.trainer.jobs:
            orders.take(1, True)
        return await inner(**job)

    inner, site.trainer.run = site.trainer.run, train  # type: ignore[method-assign, assignment]

    site.on_commit = save

    async def operator() -> None:
        work = asyncio.create_task(site.work())
        await asyncio.sleep(60.0)
        seen.append((site.training.progress.phase, len(site.trainer.jobs)))
        orders.take(2, False)
        await work

    run(operator())
    assert seen == [1, (Phase.PHASE_PAUSED, 1), 2, 3]


def test_an_older_order_changes_nothing() -> None:
    orders = Orders()
    orders.take(3, True)
    orders.take(2, False)
    assert (orders.epoch, orders.paused) == (3, True)


def test_the_others_hear_of_a_pause_at_once() -> None:
    async def paused() -> tuple[int, int]:
        orders, crowd, progress = Orders(), Crowd(), Progress(Phase.PHASE_WAITING)
        orders.take(1, True)
        waiting = asyncio.create_task(orders.resumed(progress, crowd))  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        phase = progress.phase
        orders.take(2, False)
        await waiting
        return crowd.told, phase

    assert run(paused()) == (1, Phase.PHASE_PAUSED)
