"""The coordinator's side of domain experts: holds the current plan, if any, and passes on what arrives for it.

Sites report as facts of the kind "expert". Everything that must outlive the coordinator is in its database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_coordinator.experts.execution import PlanExecution
from pier_coordinator.store.experts import AcceptedPlan, accept_experts
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
    """Accepts plans of experts and runs the current one."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._of = coordinator
        self._current: PlanExecution | None = None
        if known := coordinator.store.experts():
            accepted, plan = known
            self._current = PlanExecution(coordinator, plan, accepted)

    @property
    def plan(self) -> AcceptedPlan | None:
        """The current plan; None: none was accepted."""
        return self._current.plan if self._current else None

    @property
    def complete(self) -> bool:
        """Whether all experts are done."""
        return self._current is not None and self._current.plan.complete

    async def accept(self, plan: AcceptedPlan) -> None:
        """Accept a plan and give the sites their jobs. Raises Refused."""
        if self._current and self._current.goes_on:
            raise Refused(f"the plan {self._current.plan.id[:8]} is not complete: its experts are being trained")
        names = {site.name: site.node for site in self._of.sites.values() if site.revoked_at is None}
        if unknown := sorted({site.name for site in plan.sites} - names.keys()):
            raise Refused(f"there is no site {unknown[0]} in this run: plan with those that are (no [[sites]])")
        begun, now = plan.updated(each.accepted_at(names[each.site]) for each in plan.jobs), self._of.wall()
        await self._of.store.do(accept_experts, begun, now)
        self._current = PlanExecution(self._of, begun, now)
        await self._current.begin()

    async def welcome(self, node: str) -> None:
        """Take in a site that registers. One that joined after the plan was accepted may train experts as well."""
        if self._current:
            await self._current.welcome(node)

    async def take(self, node: str, facts: Iterable[Fact]) -> None:
        """Take in what a site reports about its experts; the facts are already stored."""
        for fact in facts:
            if fact.kind == "expert" and self._current and text(fact.body, "plan") == self._current.plan.id:
                await self._current.heard(node, fact.body)

    async def look(self, now: float) -> None:
        """Look for sites that are lost, new, slow or idle; `now` is in seconds on any monotonic clock."""
        if self._current:
            await self._current.look(now)

    async def evaluate(self, extra: Sequence[ScoredDomain], rows: int, patience: float, folder: Path) -> None:
        """Let the sites score the experts, each as soon as it is done; see Evaluation. Raises Refused."""
        if self._current is None:
            raise Refused(f"no plan of experts was accepted: {START}")
        await self._current.evaluate(extra, rows, patience, folder)

    async def delivered(self, node: str, sheet: ScoreSheet, content: bytes) -> None:
        """Take a score sheet, or the reason why there is none. Raises Refused."""
        if self._current is None:
            raise Refused("no plan of experts was accepted")
        await self._current.delivered(node, sheet, content)

    async def give_checkpoint(self, node: str, plan: str, kept: Kept, parts: AsyncIterator[CheckpointPart]) -> None:
        """Take the checkpoint of a job from its site. Raises Refused."""
        current = self._concerned(node, plan, kept.job)
        job = current.plan.jobs[kept.job].job
        if kept.step > job.steps:
            raise Refused(f"that expert has {job.steps} steps")
        length = Layout.of(job.run(self._of.config).model).length
        await current.checkpoints.take(node, kept, length, parts, lambda: not current.is_over(kept.job))
        current.tidy([kept.job])  # its chain may be done by now; if the job has moved, it continues from here

    def fetch_checkpoint(self, node: str, plan: str, job: int) -> AsyncIterator[CheckpointPart]:
        """Yield the parts of the checkpoint of one of this site's jobs. Raises Refused."""
        return self._concerned(node, plan, job).checkpoints.parts(job)

    def told(self) -> dict[str, Any]:
        """The plan and its progress, for people and scripts."""
        return self._current.told() if self._current else {"plan": None, "experts": []}

    def shown(self) -> dict[str, Any] | None:
        """The plan and its progress, for the page; None: there is no plan."""
        return self._current.shown() if self._current else None

    def scoring_told(self) -> dict[str, Any]:
        """The progress of the evaluation; {}: there is none."""
        return self._current.evaluation.told() if self._current else {}

    def _concerned(self, node: str, plan: str, job: int) -> PlanExecution:
        """The current plan, if a checkpoint of this job from or for this site is useful. Raises Refused."""
        if self._current is None or self._current.plan.id != plan:
            raise Refused("that plan of experts does not hold any more")
        if not self._current.needs_checkpoint(node, job):
            raise Refused("that expert is not trained by this site")
        return self._current
