"""A site whose surroundings are all played: its trainer, its rounds, its roster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rounds.cases import config, outer_state
from simulation.cluster import LENGTH, TinyLayout
from simulation.virtual_time import run

from pier_node.base.shared import SharedVector
from pier_node.base.tasks import Signal
from pier_node.config.run import RunConfig
from pier_node.engine.messages import Done
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_node.outer.times import Times
from pier_node.rounds.progress import Progress
from pier_node.rounds.state_store import Checkpoint
from pier_node.site.agreement import OfAll, Peers
from pier_node.site.loop import Orders, run_work
from pier_node.site.training import Training
from pier_proto.v1.peer_pb2 import Link, Pulse

ME = "me"
LOCAL: dict[str, Any] = {"algorithm": "diloco", "inner_steps": 4, "momentum": 0.0, "lr": 1.0}


@dataclass
class Job:
    first_step: int
    steps: int
    sequences: int
    payload: str
    start: float
    adam_step: int | None
    adam_m: float


class Trainer:
    """Each step takes 1 from every weight; `lands` overrules what comes out.

    When it hears that it is enough, it stops after `stops_after` steps of a job; None: it does all.
    """

    def __init__(self) -> None:
        self.stops_after: int | None = None
        self.told = asyncio.Event()
        self.outbox, self.adam_m, self.adam_v = (SharedVector(LENGTH) for _ in range(3))
        self.jobs: list[Job] = []
        self.lands: float | None = None

    async def run(
        self,
        first_step: int,
        steps: int,
        sequences: int,
        payload: str,
        load: SharedVector,
        adam_step: int | None = None,
        on_progress: Any = None,
    ) -> Done:
        start = float(load.array[0])
        self.jobs.append(Job(first_step, steps, sequences, payload, start, adam_step, float(self.adam_m.array[0])))
        if self.stops_after is None:
            await asyncio.sleep(1.0)
        else:
            self.told.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.told.wait(), 1.0)
                steps = min(steps, self.stops_after)
        self.outbox.array[:] = start - steps if self.lands is None else self.lands
        self.adam_m.array += 1
        return Done(0, steps, 10 * steps, first_step + steps, 1.0, 0)

    def enough(self) -> None:
        self.told.set()

    async def evaluate(self, weights: SharedVector) -> float:
        return float(weights.array[0])


class Rounds:
    """Plays what becomes of each update: "in" the next state, "out" of it, or an exception."""

    def __init__(self, state: OuterState, *fates: Any) -> None:
        self.state, self.sites, self.fates, self.times = state, 0, [*fates], Times()
        self.heard: list[tuple[float, int]] = []
        self.committed: list[OuterState] = []
        self.drops = 0.0
        self.roster = Roster()
        self.decided, self.news, self.disk = state, Signal(), asyncio.Event()
        self.disk.set()

    async def commit(self, update: Update, advance: Callable[..., OuterState], sites: int = 1) -> OuterState:
        self.sites = sites
        self.heard.append((float(update.sent()[0]), update.tokens))
        fate = self.fates.pop(0) if self.fates else "in"
        if isinstance(fate, BaseException):
            raise fate
        if update.error is not None:
            update.error[:] = self.drops
        mean, tokens = update.copied(), {ME: update.tokens}
        if fate != "in":
            mean.array[:], tokens = 0, {}
        self.decided = advance(self.state, mean, {**tokens, "other": 1})
        self.news.notify()
        await self.disk.wait()
        self.state = self.decided
        self.committed.append(self.state)
        return self.state

    commit_alone = commit

    async def until_decided(self, round: int, work: asyncio.Task[bool]) -> None:
        work.add_done_callback(lambda _: self.news.notify())
        await self.news.until(lambda: work.done() or self.decided is not self.state)

    def coming(self) -> int:
        return self.state.round + 1

    def sources(self) -> list[str]:
        return self.roster.ahead(self.state.round)

    async def adopt(self, state: OuterState, proof: Sequence[Link]) -> None:
        self.state = self.decided = state

    def trust(self) -> None:
        """Nothing is proved here."""


@dataclass
class Roster:
    """Says who is ahead, once for every question asked of it; and where the others are."""

    node = ME
    lead: list[list[str]] = field(default_factory=list)
    said: Mapping[str, Pulse] = field(default_factory=dict)
    changed: Signal = field(default_factory=Signal)
    on_tell: Callable[[], None] = lambda: None

    def ahead(self, round: int) -> list[str]:
        return self.lead.pop(0) if self.lead else []

    def pulse_of(self, node: str) -> Pulse | None:
        return self.said.get(node)

    def pulses(self) -> Mapping[str, Pulse]:
        return self.said

    def participants(self) -> Mapping[str, Pulse]:
        return self.said

    def tell(self) -> None:
        self.on_tell()


class Carrier:
    node = ME


class Site:
    """A Training whose surroundings are all played."""

    def __init__(self, run_config: RunConfig, rounds: Rounds, roster: Roster | None = None) -> None:
        self.trainer, self.rounds, self.roster = Trainer(), rounds, roster or Roster()
        rounds.roster = self.roster
        self.saved: list[Checkpoint] = []
        self.on_commit: Callable[[Checkpoint], Awaitable[None]] = self.save
        self.orders = Orders()
        layout: Any = TinyLayout()
        carrier: Any = Carrier()
        crowd: Any = self.roster
        played: Any = rounds
        agreement = OfAll(played, Peers(carrier, crowd, LENGTH))
        self.training = Training(run_config, layout, agreement, self.trainer, Progress(), self._committed)

    async def save(self, checkpoint: Checkpoint) -> None:
        self.saved.append(checkpoint)

    async def _committed(self, checkpoint: Checkpoint, kept: Awaitable[object]) -> None:
        await kept
        await self.on_commit(checkpoint)

    def run(self) -> None:
        run(self.work())

    async def work(self) -> None:
        roster: Any = self.roster
        await run_work(self.training, roster, self.orders)


def local(rounds: int = 1, **inner: Any) -> RunConfig:
    return config(inner={"total_steps": 4 * rounds, "eval_every": 0, **inner}, **LOCAL)


def begin(**ledger: int) -> OuterState:
    return outer_state([ME], anchor=[100.0] * LENGTH, **ledger)
