"""Executes plans of experts: which site trains which expert, what is done, and which site takes over after a change.

The sites get their jobs as orders, and report as facts of the kind "expert". Everything that must outlive the
coordinator is in its database. Jobs and orders are stored one after the other; a coordinator that is killed in between,
or whose disk is full, gives the orders later: it notes which sites need one before the jobs change, and the first look
after a start finds the rest. When a site is lost, joins or deviates from the plan, the remaining work is planned again
(replan.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_coordinator.experts.checkpoints import Checkpoints
from pier_coordinator.experts.replan import Chain, ExpertSites, OpenWork, replanned
from pier_coordinator.experts.scheduling import Limits, NoPlaceError
from pier_coordinator.experts.scoring import Scoring
from pier_coordinator.store.experts import RESULT, AcceptedPlan, Expert, accept_experts, put_experts
from pier_coordinator.store.facts import Fact, amount, event, number, text, whole
from pier_coordinator.store.sites import Refused
from pier_node.experts.resume import Kept
from pier_node.experts.sheet import ScoredDomain
from pier_node.outer.layout import Layout
from pier_node.site.coordinator.expert_messages import job_fields, scoring_fields
from pier_proto.v1.coordinator_pb2 import CheckpointPart, FetchCheckpointRequest, ScoreSheet

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator

DECIDED = ("plan", "jobs", "complete")
"""The fields of an order that follow from the jobs. An outdated value of the other fields does no harm."""
LIMITS = Limits(seconds=2.0, gap=0.1)
"""Solver limits for replanning; speeds are not known more accurately than this gap."""
START = "pier-coordinator experts start"


class ExpertRun:
    """Accepts plans of experts and runs the current one."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._of = coordinator
        self._current: PlanExecution | None = None
        self._turn = asyncio.Lock()  # no plan is accepted while another is, or while one is planned anew
        if known := coordinator.store.experts():
            accepted, plan = known
            self._current = PlanExecution(coordinator, plan, accepted)

    async def accept(self, plan: AcceptedPlan) -> None:
        """Accept a plan and give the sites their jobs. Raises Refused."""
        async with self._turn:
            current = self._current.plan if self._current else None
            if current and not current.complete and all(job.node for job in current.jobs):
                raise Refused(f"the plan {current.id[:8]} is not complete: its experts are being trained")
            names = {site.name: site.node for site in self._of.sites.values() if site.revoked_at is None}
            if unknown := sorted({site.name for site in plan.sites} - names.keys()):
                raise Refused(f"there is no site {unknown[0]} in this run: plan with those that are (no [[sites]])")
            jobs, now = [each.accepted_at(names[each.site]) for each in plan.jobs], self._of.wall()
            begun = plan.of_sites(names).updated(jobs)
            await self._of.store.do(accept_experts, begun, now)
            if self._current:
                self._current.end()
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
        async with self._turn:
            if self._current:
                await self._current.look(now)

    def current(self) -> PlanExecution:
        """The plan that is executed. Raises Refused: none was accepted."""
        if self._current is None:
            raise Refused(f"no plan of experts was accepted: {START}")
        return self._current

    async def give_checkpoint(
        self, node: str, plan: str, kept: Kept, parts: AsyncIterator[CheckpointPart], offset: int = 0
    ) -> None:
        """Take the checkpoint of a job from its site, after the `offset` bytes that are here. Raises Refused."""
        current = self._concerned(node, plan, kept.job)
        job = current.plan.jobs[kept.job].job
        if kept.step > job.steps:
            raise Refused(f"that expert has {job.steps} steps")
        length = Layout.of(job.run(self._of.config).model).length
        await current.checkpoints.take(node, kept, length, parts, lambda: not current.is_over(kept.job), offset)
        current.tidy([kept.job])  # its chain may be done by now; if the job has moved, it continues from here

    def fetch_checkpoint(self, node: str, request: FetchCheckpointRequest) -> AsyncIterator[CheckpointPart]:
        """Yield the parts of the checkpoint of one of this site's jobs. Raises Refused."""
        checkpoints = self._concerned(node, request.plan, request.job).checkpoints
        return checkpoints.parts(request.job, request.digest, request.offset)

    def arrived(self, node: str, digest: str) -> int:
        """Number of bytes that are here of the checkpoint with this SHA-256 (hex) from this site."""
        return self._current.checkpoints.inbox.arrived(node, digest) if self._current else 0

    def told(self) -> dict[str, Any]:
        """The plan and its progress, for people and scripts."""
        return self._current.told() if self._current else {"plan": None, "experts": []}

    def shown(self) -> dict[str, Any] | None:
        """The plan and its progress, for the page; None: there is no plan."""
        return self._current.shown() if self._current else None

    def scoring_told(self) -> dict[str, Any]:
        """The progress of the evaluation; {}: there is none."""
        return self._current.scoring_told() if self._current else {}

    def _concerned(self, node: str, plan: str, job: int) -> PlanExecution:
        """The current plan, if a checkpoint of this job from or for this site is useful. Raises Refused."""
        if self._current is None or self._current.plan.id != plan:
            raise Refused("that plan of experts does not hold any more")
        found = self._current.job(job)
        if found is None or found.node != node or self._current.is_over(job):
            raise Refused("that expert is not trained by this site")
        return self._current


class PlanExecution:
    """Executes the current plan.

    Args:
        accepted: when the plan was accepted, seconds since the epoch.

    Attributes:
        plan: the plan, with the current state of its jobs.
    """

    def __init__(self, coordinator: Coordinator, plan: AcceptedPlan, accepted: float) -> None:
        self._of, self.plan, self._accepted = coordinator, plan, accepted
        self._scoring: Scoring | None = None
        self.checkpoints = Checkpoints(coordinator.store.folder, plan.id)
        self.tidy(job.number for job in plan.jobs)
        self._idle: set[str] = set()
        self._problems: dict[int, str] = {}
        self._changing = asyncio.Lock()  # what a change of jobs was decided from must hold until it is stored
        self.expert_sites = ExpertSites(coordinator, plan, accepted)
        self._orders = ExpertOrders(coordinator, plan.id, self._wanted)

    async def begin(self) -> None:
        """Start the plan: drop all checkpoints and give the sites their jobs."""
        await asyncio.to_thread(self.checkpoints.clear)
        await self._orders.give(self._involved())

    def end(self) -> None:
        """Give no more orders: another plan was accepted."""
        self._orders.ended = True

    async def welcome(self, node: str) -> None:
        """Order a registering site that joined after the plan: there may be jobs for it once it has caught up."""
        if not self.plan.complete and node not in self._involved() and node in self.expert_sites.names().values():
            await self._orders.give([node])

    async def heard(self, node: str, body: Mapping[str, Any]) -> None:
        """Take in a site's report on an expert; a report on another site's expert is ignored."""
        async with self._changing:
            await self._heard(node, body)

    async def look(self, now: float) -> None:
        """Replan if a site is lost, has joined, is not as fast as planned, has declined a job or is out of work."""
        registry = self._of.registry
        if self._scoring and self._scoring.look(self._of.clock(), registry.is_here, self._name, self._of.revoked):
            await self._scored()
        await self._orders.pay(self._involved)
        if self.plan.complete:
            return
        if (declined := self._declined()) is not None:
            problem = self._problems.get(declined, "its site has said so")
            await self._replan(f"it cannot be trained there: {problem}", declined=declined)
        elif lost := self.expert_sites.look(now, {job.node for job in self.plan.jobs if job.node and not job.result}):
            names = ", ".join(sorted(self._of.sites[node].name for node in lost))
            await self._replan(f"{names} is silent for {self.plan.lost_after_s:.0f} s", lost)
        elif why := self.expert_sites.outdated() or self._out_of_work():
            await self._replan(why)

    async def evaluate(self, extra: Sequence[ScoredDomain], rows: int, patience: float, folder: Path) -> None:
        """Let the sites score the experts, each as soon as it is done; see Scoring."""
        self._scoring = scoring = Scoring.of(self.plan, self._accepted, extra, rows, patience, folder)
        scoring.follow(self.plan.jobs, self._of.clock())
        await asyncio.to_thread(scoring.begin, self._of.clock())
        await self._orders.give(self._involved())

    async def delivered(self, node: str, sheet: ScoreSheet, content: bytes) -> None:
        """Take a score sheet, or the reason why there is none. Raises Refused."""
        scoring, now = self._scoring, self._of.clock()
        if scoring is None or scoring.id != sheet.scoring:
            raise Refused("no such evaluation is under way")
        if sheet.problem:
            scoring.cannot(node, sheet.expert, sheet.domain, sheet.problem, now)
        else:
            await asyncio.to_thread(scoring.take, node, sheet.expert, content, now)
        if scoring.finished:
            await self._scored()

    def scoring_told(self) -> dict[str, Any]:
        """The progress of the evaluation; {}: there is none."""
        return self._scoring.told(self._of.registry.is_here, self._name) if self._scoring else {}

    def job(self, index: int) -> Expert | None:
        """The job of that number; None: there is none."""
        return self.plan.jobs[index] if index < len(self.plan.jobs) else None

    def is_over(self, index: int) -> bool:
        """Whether the whole chain that contains a job is done."""
        return all(self.plan.jobs[each].result for each in self.plan.chain(index))

    def tidy(self, indices: Iterable[int]) -> None:
        """Delete the checkpoints of those of these jobs whose chain is done, for the whole chain; blocks."""
        for index in indices:
            if self.is_over(index):
                for each in self.plan.chain(index):
                    self.checkpoints.drop(each)

    def told(self) -> dict[str, Any]:
        """The plan and its progress, for people and scripts; what is not known is None."""
        return {
            "plan": self.plan.id,
            "mode": self.plan.mode,
            "seconds": self.plan.seconds,
            "complete": self.plan.complete,
            "experts": [self._told(job) for job in self.plan.jobs],
        }

    def shown(self) -> dict[str, Any]:
        """The plan and its progress as the page shows them, its experts in the order in which sites train them."""
        rows = [self._shown(self.plan.jobs[index]) for index in self._in_order()]
        return {"plan": self.plan.id, "mode": self.plan.mode, "seconds": self.plan.seconds, "rows": rows}

    # --- internals -------------------------------------------------------------------------------

    async def _heard(self, node: str, body: Mapping[str, Any]) -> None:
        job = self.job(whole(body, "job") or 0)
        if job is None or job.node != node or job.result:
            return
        if problem := text(body, "problem"):  # the next look finds another site for it
            self._problems[job.number] = problem
            await self._put([job.declined_by(node)])
        elif body.get("done") is True:
            await self._done(job, node, body)
        else:
            step, flops = whole(body, "step") or 0, job.job.flops / job.job.steps
            self.plan = self.plan.updated([job.progressed(step, number(body, "training_loss"))])
            self.expert_sites.paces.heard(node, job.number, step, amount(body, "seconds"), flops)

    async def _done(self, job: Expert, node: str, body: Mapping[str, Any]) -> None:
        if all(other.result for other in self.plan.jobs if other is not job):
            self._orders.owe(self._involved())
        await self._put([done := job.done(body)])
        gate = "accepted" if done.result and done.result["accepted"] else "refused, its parent stands in"
        losses = f"{amount(body, 'parent_loss'):.4f} -> {amount(body, 'loss'):.4f} bits per byte"
        await self._tell(f"the expert of {self._domain(job.number)} is done: {losses}, {gate}", node)
        if self.plan.complete:
            await self._tell(f"all {len(self.plan.jobs)} experts of the plan {self.plan.id[:8]} are there")
            await self._orders.give(self._involved())
        elif self._scoring and self._scoring.order(node):
            await self._orders.give([node])

    def _declined(self) -> int | None:
        """A job that is still assigned to a site that has declined it."""
        return next((job.number for job in self.plan.jobs if job.node in job.declined and not job.result), None)

    def _out_of_work(self) -> str:
        """Why to replan: a site has run out of work since the last look, others have jobs not begun; "": no reason."""
        work, named = self._open_work(), self.expert_sites.names()
        chains = work.chains()
        busy = {work.node(chain) for chain in chains}
        idle = {site.name for site in self.expert_sites.here() if named[site.name] not in busy}
        new, self._idle = idle - self._idle, idle
        waits = any(work.node(chain) and not work.is_begun(chain) for chain in chains)
        return f"{min(new)} has nothing left to train" if new and waits else ""

    async def _replan(self, why: str, lost: Collection[str] = (), declined: int | None = None) -> None:
        """Move experts to where all are done soonest; those that move continue from their checkpoints.

        If there is no place for the experts of a lost site, they wait until it is back or another site joins. A chain
        that has changed during planning is not moved; the next look handles it.
        """
        work, sites, named = self._open_work(), self.expert_sites.here(), self.expert_sites.names()
        adrift = [
            chain
            for chain in work.chains()
            if work.node(chain) in ("", *self.expert_sites.lost)
            or declined in chain  # the plan waits for other silent sites
        ]
        moving = [chain for chain in work.chains() if chain in adrift or self._of.registry.is_here(work.node(chain))]
        rests = [work.remainder(chain, chain in adrift, sites) for chain in moving]
        stuck = [chain for chain, rest in zip(moving, rests) if not any(rest.job.fits(site) for site in sites)]
        placed = [rest for chain, rest in zip(moving, rests) if chain not in stuck]
        try:
            where = (await asyncio.to_thread(replanned, placed, sites, LIMITS)).places if placed else ()
        except NoPlaceError:
            stuck, where = moving, ()
        self.expert_sites.planned_with(sites)
        nodes = [named[sites[place].name] for place in where]
        if any(self._of.sites[node].revoked_at is not None for node in nodes):
            await self._replan(why, lost, declined)
            return
        await self._move(work, [chain for chain in moving if chain not in stuck], nodes, why)
        given_up = [chain for chain in stuck if declined in chain or work.node(chain) in lost]
        await self._strand([chain for chain in given_up if self._is_so(work, chain)], declined, why)

    def _is_so(self, work: OpenWork, chain: Chain) -> bool:
        """Whether a chain has not changed since the snapshot."""
        return all(self.plan.jobs[each].is_as(work.plan.jobs[each]) for each in chain)

    async def _move(self, work: OpenWork, chains: Iterable[Chain], nodes: Iterable[str], why: str) -> None:
        """Let these sites train these chains, starting from the checkpoints that are kept."""
        touched: set[str] = set()
        for chain, node in zip(chains, nodes):
            async with self._changing:
                if node == work.node(chain) or not self._is_so(work, chain):
                    continue
                touched |= {node, work.node(chain)}
                self._orders.owe({node, work.node(chain)})
                await self._put(self.plan.jobs[each].moved_to(node) for each in chain)
                said = f"{self._of.sites[node].name} trains the expert of {self._called([chain])}"
                await self._tell(f"{said} {self.checkpoints.start_of(chain)}: {why}", node, 30)
        if touched:
            await self._orders.give(touched - {""})

    async def _strand(self, chains: Collection[Chain], declined: int | None, why: str) -> None:
        """No other site can train these chains: a declined one is left without a site, the others wait for theirs."""
        for chain in chains:
            if declined in chain:
                had = {self.plan.jobs[each].node for each in chain}
                self._orders.owe(had)
                await self._put(self.plan.jobs[each].moved_to("") for each in chain)
                await self._orders.give(had)
        if chains:
            await self._tell(f"nobody else can train the experts of {self._called(chains)}: {why}", level=40)

    def _open_work(self) -> OpenWork:
        kept = {job.number: self.checkpoints.step(job.number) for job in self.plan.jobs}
        return OpenWork(self.plan, kept, self.expert_sites.labels())

    def _wanted(self, node: str) -> dict[str, Any]:
        """What the order to a site should say."""
        own = self._in_order(node)
        jobs, kept = [job_fields(self.plan.jobs[each].job) for each in own], map(self.checkpoints.of, own)
        checkpoints = [each.model_dump() for each in kept if each]
        told = {"plan": self.plan.id, "jobs": jobs, "complete": self.plan.complete, "checkpoints": checkpoints}
        order = self._scoring.order(node) if self._scoring else None
        return {**told, "scoring": scoring_fields(order)} if order else told

    def _in_order(self, node: str | None = None) -> list[int]:
        """The jobs of a site, or of all (None), in the order of training: the shortest chain first."""
        chains = self.plan.queue()
        return [each for chain in chains for each in chain if node in (None, self.plan.jobs[each].node)]

    async def _put(self, jobs: Iterable[Expert]) -> None:
        changed = [*jobs]
        await self._of.store.do(put_experts, self.plan.id, changed)
        self.plan = self.plan.updated(changed)
        await asyncio.to_thread(self.tidy, [job.number for job in changed])
        if self._scoring:
            self._scoring.follow(changed, self._of.clock())

    async def _scored(self) -> None:
        """After something was scored or given up, give the sites their new orders."""
        await self._orders.give(self._involved())
        if self._scoring and self._scoring.finished:
            missing = [expert.domain for expert in self._scoring.experts if expert.problem]
            lost = f"; missing: {', '.join(missing)}" if missing else ""
            await self._tell(f"the experts are scored{lost}", level=30 if missing else logging.INFO)

    def _involved(self) -> set[str]:
        """Node ids of the sites in the plan and of those that hold an order of it."""
        planned, named = {site.name for site in self.plan.sites}, self.expert_sites.names()
        return self._orders.holders() | {node for name, node in named.items() if name in planned}

    async def _tell(self, said: str, node: str = "", level: int = logging.INFO) -> None:
        await self._of.store.add_facts([event(self._of.wall(), said, node, level)])

    def _name(self, node: str) -> str:
        return self._of.sites[node].name

    def _domain(self, index: int) -> str:
        return self.plan.jobs[index].job.domain.name

    def _called(self, chains: Iterable[Chain]) -> str:
        return ", ".join(self._domain(each) for chain in chains for each in chain)

    def _expected(self, job: Expert) -> tuple[str | None, float]:
        """The name of the job's site, if it has one, and the seconds that it is expected to take there."""
        name = self._name(job.node) if job.node in self._of.sites else None
        return name, self.expert_sites.seconds(job, self.expert_sites.labels().get(job.node, job.site))

    def _told(self, job: Expert) -> dict[str, Any]:
        (site, expected), done = self._expected(job), job.steps_done(self.checkpoints.step(job.number))
        told = {"domain": job.job.domain.name, "size": job.job.size, "steps": job.job.steps}
        place = {"number": job.number, "site": site, "done": done, "after": job.job.after}
        return {**told, **place, "expected_seconds": expected, **(job.result or dict.fromkeys(RESULT))}

    def _shown(self, job: Expert) -> dict[str, Any]:
        told, result = self._told(job), job.result or {}
        in_training = None if job.training_loss is None else job.training_loss / math.log(2)
        return {
            **{key: told[key] for key in ("number", "domain", "size", "steps", "done")},
            "node": job.node,
            "site": told["site"] or "",
            "state": job.state,
            "seconds": told["expected_seconds"],
            "loss": result.get("loss", in_training),
            "parent_loss": result.get("parent_loss"),
            "error": result.get("standard_error"),
        }


class ExpertOrders:
    """The orders of the plan with this id; `wanted` gives what the order to a site should say now.

    Attributes:
        ended: whether another plan was accepted, whose orders hold.
    """

    def __init__(self, coordinator: Coordinator, plan: str, wanted: Callable[[str], dict[str, Any]]) -> None:
        self._of, self._plan, self._wanted = coordinator, plan, wanted
        self._owed: set[str] | None = None
        self.ended = False

    async def give(self, nodes: Iterable[str]) -> None:
        """Give these sites their current orders."""
        for node in sorted({*nodes} - {""}):
            if self._of.sites[node].revoked_at is None and not self.ended:
                await self._of.assign({"expert": self._wanted(node)}, [node])
            if self._owed is not None:
                self._owed.discard(node)

    def owe(self, nodes: Iterable[str]) -> None:
        """Note that these sites are about to need another order."""
        if self._owed is not None:
            self._owed |= {*nodes}

    async def pay(self, involved: Callable[[], Iterable[str]]) -> None:
        """Give the orders that are owed.

        The first call after a start finds them: the involved sites whose order is not what it should be.
        """
        if self._owed is None:
            self._owed = {node for node in involved() if self._is_behind(node)}
        await self.give(self._owed)

    def holders(self) -> set[str]:
        """Node ids of the sites whose order is of this plan."""
        return {node for node, order in self._of.orders.items() if _expert(order.assignment).get("plan") == self._plan}

    def _is_behind(self, node: str) -> bool:
        known, wanted = _expert(self._of.orders[node].assignment), self._wanted(node)
        return any(known.get(key) != wanted[key] for key in DECIDED)


def _expert(assignment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The expert part of an assignment; {}: it is of another kind."""
    return dict(assignment.get("expert", {}))
