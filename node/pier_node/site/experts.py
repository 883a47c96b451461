"""A site's part of an ensemble: trains one expert after the other, starting from the final model of the run.

All sites hold that model, so it is not sent. Jobs arrive with the coordinator's orders, and may be reassigned to
another site if this one is silent for too long. A pause takes effect at once and loses the work since the last
checkpoint. A site scores its experts locally: only log-probabilities travel to the coordinator, as score sheets.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from pier_node.base.errors import PierError
from pier_node.base.tasks import first_of
from pier_node.base.units import printable
from pier_node.config.run import RunConfig
from pier_node.engine.messages import Progress as Step
from pier_node.experts.card import Card
from pier_node.experts.job import SEED, ExpertJob
from pier_node.experts.scoring import Said, scored
from pier_node.experts.sheet import ScoringOrder
from pier_node.experts.trainer import Parent, Shop, export_parent, train_expert
from pier_node.outer.state import OuterState
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.site.coordinator.client import Coordination
from pier_node.site.coordinator.expert_messages import card_record, problem_record, progress_record
from pier_node.site.coordinator.link import Refused
from pier_node.site.expert_checkpoints import ExpertCheckpoints, JobCheckpoints
from pier_node.site.loop import Experts, Orders, Work, run_work
from pier_node.site.settings import Settings
from pier_node.trainer.model.export import import_weights
from pier_proto.v1.coordinator_pb2 import Record, ScoreSheet
from pier_proto.v1.peer_pb2 import Phase

PROBLEM = 2000
"""Maximum length of the reason why something cannot be scored, in characters."""

Deliver = Callable[[ScoreSheet, bytes], Awaitable[None]]
"""Returns when the coordinator has the sheet. Raises Refused: the coordinator does not want it."""

log = logging.getLogger(__name__)


class ExpertScoring:
    """Scores what is ordered, each expert once per order.

    Args:
        folder: the site's data folder. Its experts are in `experts`; sheets being sent are in `scores`.
    """

    def __init__(self, folder: Path, deliver: Deliver) -> None:
        self._folder, self._deliver = folder, deliver
        self._over: set[tuple[str, str]] = set()

    def due(self, order: ScoringOrder | None) -> ScoringOrder | None:
        """The part of an order that is still to be done; None: nothing."""
        if order is None:
            return None
        names = tuple(name for name in order.experts if (order.id, name) not in self._over)
        return order.model_copy(update={"experts": names}) if names else None

    async def run(self, order: ScoringOrder) -> None:
        """Score the experts and send the results. What cannot be scored is reported."""
        out = self._folder / "scores"
        log.info("scoring %d experts on the text of %d domains", len(order.experts), len(order.domains))
        try:
            async with aclosing(scored(order, self._folder / "experts", out)) as lines:
                async for said in lines:
                    await self._tell(order.id, said)
        except (PierError, OSError) as error:
            log.error("experts cannot be scored here: %s", error)
            for name in order.experts:
                problem = error.problem if isinstance(error, PierError) else str(error)
                await self._tell(order.id, Said(name, problem=problem))
        finally:
            await asyncio.to_thread(shutil.rmtree, out, ignore_errors=True)
        self._over |= {(order.id, name) for name in order.experts}

    async def _tell(self, scoring: str, said: Said) -> None:
        problem = printable(said.problem[:PROBLEM])
        about = ScoreSheet(scoring=scoring, expert=said.expert, domain=said.domain, problem=problem)
        content = await asyncio.to_thread(Path(said.sheet).read_bytes) if said.sheet else b""
        try:
            await self._deliver(about, content)
        except Refused as refused:
            log.warning("the coordinator does not want what is scored: %s", refused)


TELL_SECONDS = 5.0
"""Seconds between two progress reports of an expert."""


async def train_experts(
    config: RunConfig,
    settings: Settings,
    seed: OuterState,
    coordination: Coordination,
    progress: Progress,
    roster: Roster,
) -> Path:
    """Train what the coordinator orders, from the run's last state. Returns the folder of this site's experts."""
    shop = Shop(config, settings.folder, settings.workers)
    parent = Parent(seed.digest.hex(), config.model, seed.anchor)
    scoring = ExpertScoring(settings.folder, coordination.client.deliver)
    checkpoints = ExpertCheckpoints(coordination.client)
    orders = coordination.orders
    work = ExpertTraining(shop, parent, orders, progress, coordination.reports.add, scoring, checkpoints)
    await run_work(work, roster, orders)
    return shop.place("")


class ExpertTraining(Work):
    """The loop of a site, until the plan no longer needs it.

    Args:
        seed: the run's final model.
        tell: takes records for the coordinator.
    """

    def __init__(
        self,
        shop: Shop,
        seed: Parent,
        orders: Orders,
        progress: Progress,
        tell: Callable[[Record], None],
        scoring: ExpertScoring,
        checkpoints: ExpertCheckpoints,
    ) -> None:
        self._shop, self._seed, self._orders, self._scoring = shop, seed, orders, scoring
        self._checkpoints = checkpoints
        self.progress, self._tell = progress, tell
        self._done: dict[tuple[str, int], tuple[Card, float]] = {}
        self._declined: set[tuple[str, int]] = set()
        self._taken_up: Experts | None = None
        self._began = self._told = 0.0

    # --- what the site's loop calls ------------------------------------------------------------

    def due(self) -> bool:
        """Whether the plan still needs this site."""
        experts = self._orders.experts
        return experts is not None and not (experts.complete and not self._scoring.due(experts.scoring))

    async def step(self) -> None:
        """Train the next expert, or score those that are here, or wait for an order."""
        experts = self._orders.experts
        assert experts is not None
        self._take_up(experts)
        job = self._next(experts)
        if job is not None:
            await self._while_wanted(self._train(experts.plan, job), partial(self._wants, experts.plan, job))
        elif scoring := self._scoring.due(experts.scoring):
            await self._while_wanted(self._scoring.run(scoring), partial(self._wants_scored, scoring.id))
        else:
            self.progress.phase = Phase.PHASE_WAITING
            await self._orders.changed.until(lambda: self._orders.experts is not experts)

    async def close(self) -> None:
        """Give up checkpoints that are on their way."""
        await self._checkpoints.end()

    def _take_up(self, experts: Experts) -> None:
        """On a new order, report finished jobs again, since another site may have had them; retry declined ones."""
        if experts is self._taken_up:
            return
        self._taken_up = experts
        self._declined.clear()
        for job in experts.jobs:
            if done := self._done.get((experts.plan, job.number)):
                self._tell(card_record(experts.plan, job, *done))

    def _next(self, experts: Experts) -> ExpertJob | None:
        if experts.complete:
            return None
        over = self._done.keys() | self._declined
        return next((job for job in experts.jobs if (experts.plan, job.number) not in over), None)

    def _wants(self, plan: str, job: ExpertJob) -> bool:
        wanted = self._orders.experts
        return wanted is not None and wanted.plan == plan and job in wanted.jobs

    def _wants_scored(self, scoring: str) -> bool:
        wanted = self._orders.experts
        return wanted is not None and wanted.scoring is not None and wanted.scoring.id == scoring

    async def _while_wanted(self, doing: Coroutine[Any, Any, None], wanted: Callable[[], bool]) -> None:
        """Run a coroutine until it ends, this site is no longer asked for it, or training is paused."""
        self.progress.phase = Phase.PHASE_TRAINING
        try:
            await first_of(doing, self._orders.changed.until(lambda: self._orders.paused or not wanted()))
        finally:
            self.progress.expert = ""

    async def _train(self, plan: str, job: ExpertJob) -> None:
        self._began = self._told = time.monotonic()
        log.info("training the expert of %s: %s, %d steps", job.domain.name, job.size, job.steps)
        try:
            parent = await asyncio.to_thread(self._parent, plan, job)
            elsewhere = self._job_checkpoints(plan, job)
            card = await train_expert(job, parent, self._shop, lambda step: self._stepped(plan, job, step), elsewhere)
            await self._keep_parent(card, parent)
        except (PierError, OSError, ValueError) as error:  # the disk is full, say, or a checkpoint gives no card
            log.error("this site cannot train the expert of %s: %s", job.domain.name, error)
            self._declined.add((plan, job.number))
            self._tell(problem_record(plan, job, error.problem if isinstance(error, PierError) else str(error)))
            return
        finally:
            await self._checkpoints.drop()
        done = self._done[plan, job.number] = card, time.monotonic() - self._began
        self._tell(card_record(plan, job, *done))

    async def _keep_parent(self, card: Card, parent: Parent) -> None:
        """Export the parent: it replaces a refused expert, or shows what the expert forgot.

        Raises PierError, OSError.
        """
        try:
            await asyncio.to_thread(export_parent, parent, self._shop)
        except (PierError, OSError) as error:
            if not card.accepted:
                raise
            log.warning("what the expert of %s forgets will not be known: %s", card.domain, error)

    def _job_checkpoints(self, plan: str, job: ExpertJob) -> JobCheckpoints:
        """The job's checkpoints, with the one that the coordinator keeps."""
        wanted = self._orders.experts
        kept = next((kept for kept in wanted.checkpoints if kept.job == job.number), None) if wanted else None
        followed = wanted is not None and any(other.after == job.number for other in wanted.jobs)
        return self._checkpoints.of(plan, job, kept, followed)

    def _parent(self, plan: str, job: ExpertJob) -> Parent:
        """The model that the job branches from; if that expert was refused, the parent that replaces it.

        Raises PierError.
        """
        if job.after == SEED:
            return self._seed
        card, _ = self._done.get((plan, job.after), (None, 0.0))
        if card is None:
            raise PierError(
                f"the expert before that of {job.domain.name} was not trained here", "Start the plan again."
            )
        name = card.name if card.accepted else card.parent
        if name == self._seed.name:
            return self._seed
        model, weights = import_weights(self._shop.place(name))
        return Parent(name, model, weights.numpy())

    def _stepped(self, plan: str, job: ExpertJob, step: Step) -> None:
        progress, now = self.progress, time.monotonic()
        progress.loss = step.loss
        progress.expert = f"{job.domain.name} ({job.size}), step {step.step + 1} of {job.steps}"
        progress.tokens_per_second = step.tokens / step.seconds if step.seconds > 0 else 0.0
        if now - self._told >= TELL_SECONDS:
            self._told = now
            done = step.step + 1
            tokens = done * job.batch_size * self._shop.run.model.context
            self._tell(progress_record(plan, job, done, step.loss, tokens, now - self._began))
