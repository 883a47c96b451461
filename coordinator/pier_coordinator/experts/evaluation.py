"""The evaluation of a plan's experts: their sites score them, while it follows the state of the plan's jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_coordinator.experts.scoring import ScoredExpert, Scoring, scoring_id
from pier_coordinator.store.experts import AcceptedPlan, Expert
from pier_coordinator.store.refusals import Refused
from pier_node.experts.sheet import ScoredDomain
from pier_node.site.coordinator.expert_messages import scoring_fields
from pier_proto.v1.coordinator_pb2 import ScoreSheet

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator


class Evaluation:
    """The newest evaluation of a plan, if there is one. The plan's execution gives the orders that it needs."""

    def __init__(self, coordinator: Coordinator, plan: AcceptedPlan, accepted: float) -> None:
        self._of, self._plan, self._accepted = coordinator, plan, accepted
        self.scoring: Scoring | None = None

    async def begin(
        self, jobs: Iterable[Expert], extra: Sequence[ScoredDomain], rows: int, patience: float, folder: Path
    ) -> None:
        """Begin an evaluation.

        Args:
            jobs: the jobs of the plan.
            extra: domains to score besides those that have an expert.
            rows: maximum number of rows per domain and split; 0: all.
            patience: seconds after which an expert is given up if nothing arrives for it.
            folder: the sheets go into a subfolder named after the evaluation's id.
        """
        own = [ScoredDomain(section=each.job.domain, digest=each.job.domain_hash) for each in self._plan.jobs]
        known = {each.section.name for each in own}
        domains = [*own, *(each for each in extra if each.section.name not in known)]
        id = scoring_id(self._plan.id, self._accepted, [each.model_dump_json() for each in domains], rows)
        experts = [ScoredExpert(self._domain(chain[-1]), "") for chain in self._plan.chains()]
        self.scoring = Scoring(id, experts, domains, rows, patience, folder / id)
        self.follow(jobs)
        await asyncio.to_thread(self.scoring.begin, self._of.clock())

    async def take(self, node: str, sheet: ScoreSheet, content: bytes) -> bool:
        """Take a sheet, or the reason why there is none; return whether the evaluation is finished. Raises Refused."""
        scoring, now = self.scoring, self._of.clock()
        if scoring is None or scoring.id != sheet.scoring:
            raise Refused("no such evaluation is under way")
        if sheet.problem:
            scoring.cannot(node, sheet.expert, sheet.domain, sheet.problem, now)
        else:
            await asyncio.to_thread(scoring.take, node, sheet.expert, content, now)
        return scoring.finished

    def look(self) -> bool:
        """Give up experts for which nothing arrives; return whether any was given up."""
        return self.scoring is not None and self.scoring.look(
            self._of.clock(), self._of.registry.is_here, self._called, self._of.revoked
        )

    def follow(self, jobs: Iterable[Expert]) -> None:
        """Take in the current state of these jobs: where their experts are, and whether they are done."""
        if self.scoring is None:
            return
        for job in jobs:
            result = job.result or {}
            # If an expert was refused, its parent is scored, whose weights the coordinator does not know.
            weights = result.get("weights", "") if result.get("accepted") else ""
            self.scoring.done(self._domain(job.number), job.node, result.get("name", ""), weights, self._of.clock())

    def wanted(self, node: str) -> dict[str, Any]:
        """The fields of a site's order that concern the evaluation."""
        order = self.scoring.order(node) if self.scoring else None
        return {"scoring": scoring_fields(order)} if order else {}

    def missing(self) -> list[str]:
        """The domains of the experts that were given up."""
        return [expert.domain for expert in self.scoring.experts if expert.problem] if self.scoring else []

    def told(self) -> dict[str, Any]:
        """The progress of the evaluation; {}: there is none."""
        return self.scoring.told(self._of.registry.is_here, self._called) if self.scoring else {}

    def _domain(self, number: int) -> str:
        return self._plan.jobs[number].job.domain.name

    def _called(self, node: str) -> str:
        return self._of.sites[node].name
