"""A site's way through its experts; how one is trained is played here, and tested in experts/test_trainer.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator.expert_cases import accepted_job
from simulation.virtual_time import run

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.experts.card import Card
from pier_node.experts.config import DomainSection
from pier_node.experts.job import SEED, ExpertJob
from pier_node.experts.resume import Kept
from pier_node.experts.sheet import ScoredDomain, ScoringOrder
from pier_node.experts.trainer import Parent, Shop
from pier_node.rounds.progress import Progress
from pier_node.site import experts as expert_training
from pier_node.site.experts import ExpertTraining
from pier_node.site.loop import Experts, Orders, run_work
from pier_proto.v1.coordinator_pb2 import ExpertRecord, Record
from pier_proto.v1.peer_pb2 import Phase

PLAN = "ab" * 16


class Crowd:
    async def announce(self) -> None:
        pass


class Trainer:
    """Takes ten seconds for each expert."""

    def __init__(self) -> None:
        self.began: list[tuple[int, str]] = []
        self.ended: list[int] = []
        self.custody: list[Any] = []
        self.fails: dict[int, Exception] = {}

    async def __call__(
        self, job: ExpertJob, parent: Parent, shop: Shop, told: Callable[[Any], None], custody: Any
    ) -> Card:
        self.custody.append(custody)
        self.began.append((job.number, parent.name))
        if job.number in self.fails:
            raise self.fails[job.number]
        told(type("Step", (), {"step": 4, "loss": 1.5, "tokens": 100, "seconds": 2.0}))
        await asyncio.sleep(10.0)
        self.ended.append(job.number)
        return card(job, parent)


def card(job: ExpertJob, parent: Parent) -> Card:
    return Card(
        name=job.name(parent.name, RunConfig()),
        domain=job.domain.name,
        domain_hash=job.domain_hash,
        parent=parent.name,
        size="S",
        steps=job.steps,
        seed=job.seed,
        tokens=1,
        flops=1.0,
        epochs=1.0,
        digest="0" * 64,
        loss=2.0,
        parent_loss=2.5,
        standard_error=0.1,
        accepted=True,
    )


class Scorer:
    """Takes ten seconds for an order."""

    def __init__(self) -> None:
        self.over: list[str] = []

    def due(self, order: ScoringOrder | None) -> ScoringOrder | None:
        return order if order and order.id not in self.over else None

    async def run(self, order: ScoringOrder) -> None:
        await asyncio.sleep(10.0)
        self.over.append(order.id)


class Checkpoints:
    """Notes when what is on its way was given up."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def of(self, plan: str, job: ExpertJob, kept: Kept | None, followed: bool) -> Any:
        return plan, job.number, kept, followed

    async def drop(self) -> None:
        self.said.append("drop")

    async def end(self) -> None:
        self.said.append("end")


SCORING = ScoringOrder(id="cd" * 16, experts=(), domains=(ScoredDomain(section=DomainSection(name="topics")),))


class Site:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.trainer, self.orders, self.progress = Trainer(), Orders(), Progress()
        self.told: list[ExpertRecord] = []
        monkeypatch.setattr(expert_training, "train_expert", self.trainer)
        monkeypatch.setattr(expert_training, "export_parent", self._export)
        self.exported: list[str] = []
        self.full = False
        config = RunConfig()
        self.seed = Parent("cd" * 32, config.model, np.zeros(1, dtype=np.float32))
        shop, crowd, self.scored = Shop(config, folder), Crowd(), Scorer()
        self.checkpoints = Checkpoints()
        of_site: Any = (self.orders, self.progress, self._tell, self.scored, self.checkpoints)
        self.training = ExpertTraining(shop, self.seed, *of_site)
        self.crowd: Any = crowd

    async def run(self) -> None:
        await run_work(self.training, self.crowd, self.orders)

    def _tell(self, record: Record) -> None:
        self.told.append(record.expert)

    def _export(self, parent: Parent, _shop: Shop) -> None:
        if self.full:
            raise OSError("disk full")
        self.exported.append(parent.name)

    def order(
        self,
        *jobs: ExpertJob,
        complete: bool = False,
        paused: bool = False,
        scoring: ScoringOrder | None = None,
        checkpoints: tuple[Kept, ...] = (),
    ) -> None:
        experts = Experts(PLAN, jobs, complete, scoring, checkpoints)
        self.orders.take(self.orders.epoch + 1, paused, experts)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    return Site(monkeypatch, tmp_path)


def job(number: int, after: int = SEED) -> ExpertJob:
    return accepted_job(number, "lab-0", after=after).job


def test_jobs_are_done_one_after_the_other_and_told_until_the_plan_is_complete(site: Site) -> None:
    async def story() -> None:
        site.order(job(0), job(2))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(15.0)
        assert site.trainer.ended == [0]
        assert site.progress.phase == Phase.PHASE_TRAINING
        assert (site.progress.loss, site.progress.tokens_per_second) == (1.5, 50.0)
        assert site.progress.expert == "formats (S), step 5 of 100"
        await asyncio.sleep(10.0)
        assert site.progress.phase == Phase.PHASE_WAITING  # for another job: a site may be lost
        site.order(job(0), job(2), job(1))
        await asyncio.sleep(11.0)
        site.order(complete=True)
        await work

    run(story())
    assert site.trainer.ended == [0, 2, 1]
    assert [told.job for told in site.told] == [0, 2, *(0, 2), 1]  # again with another order
    assert all((told.done, told.loss) == (True, 2.0) for told in site.told)
    assert site.progress.phase == Phase.PHASE_DONE


def test_what_was_done_while_the_job_was_elsewhere_is_told_when_it_is_back(site: Site) -> None:
    async def story() -> None:
        site.order(job(0))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(11.0)
        site.order()
        await asyncio.sleep(1.0)
        site.told.clear()
        site.order(job(0))
        await asyncio.sleep(1.0)
        assert [(told.job, told.done) for told in site.told] == [(0, True)]
        site.order(complete=True)
        await work

    run(story())
    assert site.trainer.ended == [0]


def test_a_job_that_goes_to_another_site_is_dropped_at_once(site: Site) -> None:
    async def story() -> None:
        site.order(job(0), job(1))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(5.0)
        site.order(job(1))
        await asyncio.sleep(11.0)
        site.order(complete=True)
        await work

    run(story())
    assert site.trainer.began == [(0, site.seed.name), (1, site.seed.name)]
    assert site.trainer.ended == [1]


def test_a_pause_takes_effect_at_once_and_the_job_goes_on_later(site: Site) -> None:
    async def story() -> None:
        site.order(job(0))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(5.0)
        site.order(job(0), paused=True)
        await asyncio.sleep(100.0)
        assert site.progress.phase == Phase.PHASE_PAUSED
        assert site.trainer.ended == []
        site.order(job(0))
        await asyncio.sleep(11.0)
        site.order(complete=True)
        await work

    run(story())
    assert site.trainer.ended == [0]


def test_a_job_is_trained_with_the_checkpoint_that_is_kept_of_it(site: Site) -> None:
    kept = Kept(job=1, step=30, size=100, digest="0" * 64)

    async def story() -> None:
        site.order(job(0), job(1), checkpoints=(kept,))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(15.0)
        site.order(job(0), job(1), checkpoints=(kept.model_copy(update={"step": 40}),))
        await asyncio.sleep(6.0)
        site.order(complete=True)
        await work

    run(story())
    assert site.trainer.custody == [(PLAN, 0, None, False), (PLAN, 1, kept, False)]
    assert site.trainer.ended == [0, 1], "another checkpoint does not stop what it was made by"
    assert site.checkpoints.said == ["drop", "drop", "end"]


def test_what_cannot_be_trained_here_is_told_and_the_next_one_begins(site: Site) -> None:
    async def story() -> None:
        site.trainer.fails = {0: PierError("the text here is another", "Copy it."), 2: OSError("disk full")}
        site.order(job(0), job(2), job(1))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(11.0)
        site.order(complete=True)
        await work

    run(story())
    assert [(told.job, told.done, told.problem) for told in site.told] == [
        (0, False, "the text here is another"),
        (2, False, "disk full"),
        (1, True, ""),
    ]


@pytest.mark.parametrize("accepted", [True, False])
def test_an_expert_is_lost_without_its_parent_only_if_that_stands_in(
    site: Site, monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    made = site.trainer.__call__

    async def trained(*told: Any) -> Card:
        return (await made(*told)).model_copy(update={"accepted": accepted})

    monkeypatch.setattr(expert_training, "train_expert", trained)

    async def story() -> None:
        site.order(job(0), job(1))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(11.0)
        site.full = True
        await asyncio.sleep(10.0)
        site.order(complete=True)
        await work

    run(story())
    assert site.exported == [site.seed.name]
    assert [(told.job, told.done) for told in site.told if told.done or told.problem] == [(0, True), (1, accepted)]


def test_what_is_to_be_scored_is_scored_after_the_jobs_and_before_the_end(site: Site) -> None:
    async def story() -> None:
        site.order(job(0), scoring=SCORING)
        work = asyncio.create_task(site.run())
        await asyncio.sleep(15.0)
        site.order(complete=True, scoring=SCORING)
        await work
        assert (site.trainer.ended, site.scored.over) == ([0], [SCORING.id])

    run(story())


def test_a_site_that_is_started_again_scores_what_it_has_trained(site: Site) -> None:
    async def story() -> None:
        site.order(job(0), complete=True, scoring=SCORING)
        await site.run()

    run(story())
    assert (site.trainer.began, site.scored.over) == ([], [SCORING.id])


def test_scoring_that_is_given_up_is_stopped(site: Site) -> None:
    async def story() -> None:
        site.order(scoring=SCORING)
        work = asyncio.create_task(site.run())
        await asyncio.sleep(5.0)
        site.order(complete=True)
        await work

    run(story())
    assert site.scored.over == []


def test_an_order_without_experts_ends_it(site: Site) -> None:
    async def story() -> None:
        site.order(job(0))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(5.0)
        site.orders.take(9, False)
        await work

    run(story())
    assert site.trainer.ended == []


def test_being_stopped_stops_the_training_of_the_expert(site: Site) -> None:
    async def story() -> None:
        site.order(job(0))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(5.0)
        work.cancel()
        await asyncio.wait([work])
        await asyncio.sleep(20.0)

    run(story())
    assert site.trainer.ended == []


def test_in_a_chain_the_parent_is_the_expert_before(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = type("Flat", (), {"numpy": lambda _self: site.seed.weights})()
    read: list[Path] = []

    def import_weights(path: Path) -> Any:
        read.append(path)
        return site.seed.model, weights

    monkeypatch.setattr(expert_training, "import_weights", import_weights)

    async def story() -> None:
        site.order(job(0), job(1, after=0))
        work = asyncio.create_task(site.run())
        await asyncio.sleep(21.0)
        site.order(complete=True)
        await work

    run(story())
    first = job(0).name(site.seed.name, RunConfig())
    assert site.trainer.began == [(0, site.seed.name), (1, first)]
    assert [path.name for path in read] == [first]
    assert [custody[-1] for custody in site.trainer.custody] == [True, False]
