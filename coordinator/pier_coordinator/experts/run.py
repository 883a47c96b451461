"""The coordinator's side of domain experts: the plan that holds, if there is one, and what comes in about it.

What sites say comes as facts of the kind "expert". Everything that must outlast the coordinator is in its database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_coordinator.experts.accepted import AcceptedPlan
from pier_coordinator.experts.execution import PlanExecution
from pier_coordinator.store.experts import JobRow
from pier_coordinator.store.facts import Fact, text
from pier_coordinator.store.refusals import Refused
from pier_node.experts.resume import Kept
from pier_node.experts.sheet import ScoredDomain
from pier_node.outer.layout import Layout
from pier_proto.v1.coordinator_pb2 import CheckpointPart, ScoreSheet

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator

START = "pier-coordinator experts start"


class ExpertRun:
    """What becomes of plans of experts."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._of = coordinator
        self._current: PlanExecution | None = None
        if known := coordinator.store.experts():
            accepted, plan, jobs = known
            self._current = PlanExecution(coordinator, AcceptedPlan.model_validate_json(plan), accepted, jobs)

    @property
    def plan(self) -> AcceptedPlan | None:
        """The one that holds; None: none was accepted."""
        return self._current.plan if self._current else None

    @property
    def complete(self) -> bool:
        """Whether all experts are there."""
        return self._current is not None and self._current.complete

    async def accept(self, plan: AcceptedPlan) -> None:
        """Give the sites their jobs. Raises Refused."""
        if self._current and self._current.goes_on:
            raise Refused(f"the plan {self._current.plan.id[:8]} is not complete: its experts are being trained")
        names = {site.name: site.node for site in self._of.sites.values() if site.revoked_at is None}
        if unknown := sorted({site.name for site in plan.sites} - names.keys()):
            raise Refused(f"there is no site {unknown[0]} in this run: plan with those that are (no [[sites]])")
        jobs = [JobRow(each.job.number, names[each.site]) for each in plan.jobs]
        now = self._of.wall()
        await self._of.store.accept_experts(plan.id, plan.model_dump_json(), jobs, now)
        self._current = PlanExecution(self._of, plan, now, jobs)
        await self._current.begin()

    async def welcome(self, node: str) -> None:
        """A site registers. One that has come into the run since the plan was accepted may train experts as well."""
        if self._current:
            await self._current.welcome(node)

    async def take(self, node: str, facts: Iterable[Fact]) -> None:
        """What a site says of its experts, stored already."""
        for fact in facts:
            if fact.kind == "expert" and self._current and text(fact.body, "plan") == self._current.plan.id:
                await self._current.heard(node, fact.body)

    async def look(self, now: float) -> None:
        """See who is lost, has come, is slow or has nothing to do; `now` by any clock that does not go back."""
        if self._current:
            await self._current.look(now)

    async def evaluate(self, extra: Sequence[ScoredDomain], rows: int, patience: float, folder: Path) -> None:
        """Have the sites score the experts, each as soon as it is done; see Evaluation. Raises Refused."""
        if self._current is None:
            raise Refused(f"no plan of experts was accepted: {START}")
        await self._current.evaluate(extra, rows, patience, folder)

    async def delivered(self, node: str, sheet: ScoreSheet, content: bytes) -> None:
        """A score sheet has come, or why there is none. Raises Refused."""
        if self._current is None:
            raise Refused("no plan of experts was accepted")
        await self._current.delivered(node, sheet, content)

    async def give_checkpoint(self, node: str, plan: str, kept: Kept, parts: AsyncIterator[CheckpointPart]) -> None:
        """The checkpoint of a job comes from its site. Raises Refused."""
        current = self._concerned(node, plan, kept.job)
        job = current.plan.jobs[kept.job].job
        if kept.step > job.steps:
            raise Refused(f"that expert has {job.steps} steps")
        length = Layout.of(job.run(self._of.config).model).length
        await current.checkpoints.take(node, kept, length, parts, lambda: not current.is_over(kept.job))
        current.tidy([kept.job])  # it may be done meanwhile; a job that went elsewhere goes on from it

    def fetch_checkpoint(self, node: str, plan: str, job: int) -> AsyncIterator[CheckpointPart]:
        """The parts of that of a job of this site. Raises Refused."""
        return self._concerned(node, plan, job).checkpoints.parts(job)

    def told(self) -> dict[str, Any]:
        """All of it, for people and scripts."""
        return self._current.told() if self._current else {"plan": None, "experts": []}

    def scoring_told(self) -> dict[str, Any]:
        """How far the evaluation is; {}: there is none."""
        return self._current.evaluation.told() if self._current else {}

    def _concerned(self, node: str, plan: str, job: int) -> PlanExecution:
        """The plan, of which that site has that job, for which a checkpoint is of use. Raises Refused."""
        if self._current is None or self._current.plan.id != plan:
            raise Refused("that plan of experts does not hold any more")
        if not self._current.needs_checkpoint(node, job):
            raise Refused("that expert is not trained by this site")
        return self._current
