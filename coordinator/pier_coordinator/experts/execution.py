"""Executes a plan of experts: which site trains which expert, what is done, and which site takes over after a change.

The sites get their jobs as orders. Jobs and orders are stored one after the other; a coordinator that is killed in
between, or whose disk is full, gives the orders later: it notes which sites need one before the jobs change, and the
first look after a start finds the rest. When a site is lost, joins or deviates from the plan, the remaining work is
planned again (replan.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier_coordinator.experts.accepted import AcceptedPlan
from pier_coordinator.experts.checkpoints import Checkpoints
from pier_coordinator.experts.evaluation import Evaluation
from pier_coordinator.experts.exact import Limits
from pier_coordinator.experts.expert_sites import ExpertSites
from pier_coordinator.experts.jobs import Job
from pier_coordinator.experts.replan import Remainder, replanned
from pier_coordinator.experts.scheduling import NoPlaceError
from pier_coordinator.experts.task import Site
from pier_coordinator.store.experts import RESULT, JobRow
from pier_coordinator.store.facts import Fact, amount, text, whole
from pier_coordinator.store.rows import event
from pier_node.experts.sheet import ScoredDomain
from pier_node.site.coordinator.expert_messages import job_fields
from pier_proto.v1.coordinator_pb2 import ScoreSheet

if TYPE_CHECKING:
    from pier_coordinator.runs.coordinator import Coordinator


DECIDED = ("plan", "jobs", "complete")
"""The fields of an order that follow from the jobs. An outdated value of the other fields does no harm."""


class ExpertOrders:
    """The orders of one plan.

    Args:
        plan: the plan's id.
        wanted: gives what the order to a site should say now.
    """

    def __init__(self, coordinator: Coordinator, plan: str, wanted: Callable[[str], dict[str, Any]]) -> None:
        self._of, self._plan, self._wanted = coordinator, plan, wanted
        self._owed: set[str] | None = None

    async def give(self, nodes: Iterable[str]) -> None:
        """Give these sites their current orders."""
        for node in sorted({*nodes} - {""}):
            if self._of.sites[node].revoked_at is None:
                await self._of.assign({"expert": self._wanted(node)}, [node])
            if self._owed is not None:
                self._owed.discard(node)

    def owe(self, nodes: Iterable[str]) -> None:
        """Note that these sites are about to need another order."""
        if self._owed is not None:
            self._owed |= {*nodes}

    async def pay(self, involved: Callable[[], Iterable[str]]) -> bool:
        """Give the orders that are owed; return whether there were any.

        The first call after a start finds them: the involved sites whose order is not what it should be.
        """
        if self._owed is None:
            self._owed = {node for node in involved() if self._is_behind(node)}
        late = bool(self._owed)
        await self.give(self._owed)
        return late

    def holders(self) -> set[str]:
        """Node ids of the sites whose order is of this plan."""
        return {node for node, order in self._of.orders.items() if _expert(order.assignment).get("plan") == self._plan}

    def _is_behind(self, node: str) -> bool:
        known, wanted = _expert(self._of.orders[node].assignment), self._wanted(node)
        return any(known.get(key) != wanted[key] for key in DECIDED)


def _expert(assignment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The expert part of an assignment; {}: it is of another kind."""
    return dict(assignment.get("expert", {}))


Chain = list[int]
"""Numbers of jobs that one site trains one after the other; most chains have one job."""


@dataclass(frozen=True)
class OpenWork:
    """A snapshot of a plan's execution: what is left to do.

    Attributes:
        plan: the plan.
        jobs: the jobs, by number.
        steps: number of steps done in jobs in progress, by number.
        kept: step after which the coordinator's checkpoint of a job was made, by number; 0: there is none.
        names: names of the sites, by node id.
    """

    plan: AcceptedPlan
    jobs: Mapping[int, JobRow]
    steps: Mapping[int, int]
    kept: Mapping[int, int]
    names: Mapping[str, str]

    def chains(self) -> list[Chain]:
        """The chains that are not done, in the order in which sites train them: the shortest first."""
        return [chain for chain in self.plan.queue() if not all(self.jobs[each].result for each in chain)]

    def node(self, chain: Chain) -> str:
        """Node id of the site that has a chain; "": no site can train it."""
        return self.jobs[chain[0]].node

    def is_begun(self, chain: Chain) -> bool:
        """Whether its site has trained a part of it itself, or trains it next."""
        own = next(each for each in self.chains() if self.node(each) == self.node(chain))
        trained = (self.steps.get(each, 0) > self.kept.get(each, 0) or self.jobs[each].result for each in chain)
        return chain == own or any(trained)

    def remainder(self, chain: Chain, adrift: bool, sites: Sequence[Site]) -> Remainder:
        """What is left of a chain. Another site would continue from the checkpoints that the coordinator keeps.

        Args:
            chain: numbers of its jobs.
            adrift: no site has the chain, or its site is lost or cannot train it.
            sites: the sites to plan with.
        """
        job, kept = self._allowed(chain, sites), sum(self._done(each, self.kept) for each in chain)
        if adrift:
            return Remainder(job, max(job.flops - kept, 1.0), kept=kept > 0)
        done = sum(self._flops(each) if self.jobs[each].result else self._done(each, self.steps) for each in chain)
        name, begun = self.names[self.node(chain)], self.is_begun(chain)
        return Remainder(job, max(job.flops - done, 1.0), max(done - kept, 0.0), name, begun, kept > 0)

    def _allowed(self, chain: Chain, sites: Sequence[Site]) -> Job:
        """A chain as a job for the sites that may train it and have not declined it."""
        job = self.plan.as_job(chain)
        barred = self._barred(chain)
        if not barred:
            return job
        left = (job.sites or frozenset(site.name for site in sites)) - barred
        return replace(job, sites=left or frozenset({""}))  # an empty set would mean all

    def _barred(self, chain: Chain) -> set[str]:
        return {self.names[node] for each in chain for node in self.jobs[each].declined}

    def _flops(self, number: int) -> float:
        return self.plan.jobs[number].job.flops

    def _done(self, number: int, steps: Mapping[int, int]) -> float:
        """FLOPs of a job that these steps (by number) amount to."""
        return self._flops(number) * min(1.0, steps.get(number, 0) / self.plan.jobs[number].job.steps)


LIMITS = Limits(seconds=2.0, gap=0.1)
"""Solver limits for replanning; speeds are not known more accurately than this gap."""


class PlanExecution:
    """Executes the current plan.

    Args:
        coordinator: the coordinator of the run.
        plan: the plan.
        accepted: when it was accepted, seconds since the epoch.
        jobs: its jobs as stored.

    Attributes:
        expert_sites: the sites that train its experts.
        evaluation: the evaluation of its experts.
        checkpoints: checkpoints of the experts in training.
    """

    def __init__(self, coordinator: Coordinator, plan: AcceptedPlan, accepted: float, jobs: Iterable[JobRow]) -> None:
        self._of, self.plan, self._accepted = coordinator, plan, accepted
        self._jobs = {job.number: job for job in jobs}
        self.checkpoints = Checkpoints(coordinator.store.folder, plan.id)
        self.tidy(self._jobs)
        self._steps = {number: self.checkpoints.step(number) for number in self._jobs}
        self._idle: set[str] = set()
        self._problems: dict[int, str] = {}
        self.expert_sites = ExpertSites(coordinator, plan, accepted)
        self.evaluation = Evaluation(coordinator, plan, accepted)
        self._orders = ExpertOrders(coordinator, plan.id, self._wanted)

    @property
    def complete(self) -> bool:
        """Whether all experts are done."""
        return all(job.result for job in self._jobs.values())

    @property
    def goes_on(self) -> bool:
        """Whether training continues: the plan is not complete, and every job has a site."""
        return not self.complete and all(job.node for job in self._jobs.values())

    async def begin(self) -> None:
        """Start the plan: drop all checkpoints and give the sites their jobs."""
        await asyncio.to_thread(self.checkpoints.clear)
        self._steps.clear()
        await self._show()
        await self._orders.give(self._involved())

    async def welcome(self, node: str) -> None:
        """Order a registering site that joined after the plan: there may be jobs for it once it has caught up."""
        if not self.complete and node not in self._involved() and node in self.expert_sites.names().values():
            await self._orders.give([node])

    async def heard(self, node: str, body: Mapping[str, Any]) -> None:
        """Take in a site's report on an expert; a report on another site's expert is ignored."""
        job = self._jobs.get(whole(body, "job") or 0)
        if job is None or job.node != node or job.result:
            return
        if problem := text(body, "problem"):  # the next look finds another site for it
            self._problems[job.number] = problem
            await self._put([job.declined_by(node)])
        elif body.get("done") is True:
            await self._done(job, node, body)
        else:
            step, each = whole(body, "step") or 0, self.plan.jobs[job.number].job
            self._steps[job.number] = step
            self.expert_sites.paces.heard(node, job.number, step, amount(body, "seconds"), each.flops / each.steps)

    async def look(self, now: float) -> None:
        """Replan if a site is lost, has joined, is not as fast as planned, has declined a job or is out of work."""
        if self.evaluation.look():
            await self._scored()
        if await self._orders.pay(self._involved):
            await self._show()
        if self.complete:
            return
        if (declined := self._declined()) is not None:
            problem = self._problems.get(declined, "its site has said so")
            await self._replan(f"it cannot be trained there: {problem}", declined=declined)
        elif lost := self.expert_sites.look(
            now, {job.node for job in self._jobs.values() if job.node and not job.result}
        ):
            names = ", ".join(sorted(self._of.sites[node].name for node in lost))
            await self._replan(f"{names} is silent for {self.plan.lost_after_s:.0f} s", lost)
        elif why := self.expert_sites.outdated() or self._out_of_work():
            await self._replan(why)

    async def evaluate(self, extra: Sequence[ScoredDomain], rows: int, patience: float, folder: Path) -> None:
        """Let the sites score the experts; see Evaluation."""
        await self.evaluation.begin(self._jobs.values(), extra, rows, patience, folder)
        await self._orders.give(self._involved())

    async def delivered(self, node: str, sheet: ScoreSheet, content: bytes) -> None:
        """Take a score sheet, or the reason why there is none. Raises Refused."""
        if await self.evaluation.take(node, sheet, content):
            await self._scored()

    def needs_checkpoint(self, node: str, number: int) -> bool:
        """Whether a checkpoint of a job is useful: the job is that site's, and its chain is not done."""
        job = self._jobs.get(number)
        return job is not None and job.node == node and not self.is_over(number)

    def is_over(self, number: int) -> bool:
        """Whether the whole chain that contains a job is done."""
        return all(self._jobs[each].result for each in self.plan.chain(number))

    def tidy(self, numbers: Iterable[int]) -> None:
        """Delete the checkpoints of those of these jobs whose chain is done, for the whole chain; blocks."""
        for number in numbers:
            if self.is_over(number):
                for each in self.plan.chain(number):
                    self.checkpoints.drop(each)

    def told(self) -> dict[str, Any]:
        """The plan and its progress, for people and scripts; what is not known is None."""
        return {
            "plan": self.plan.id,
            "mode": self.plan.mode,
            "seconds": self.plan.seconds,
            "complete": self.complete,
            "experts": [self._expert(index) for index in sorted(self._jobs)],
        }

    # --- internals -------------------------------------------------------------------------------

    async def _done(self, job: JobRow, node: str, body: Mapping[str, Any]) -> None:
        if all(other.result for other in self._jobs.values() if other is not job):
            self._orders.owe(self._involved())
        await self._put([done := job.done(body)])
        gate = "accepted" if done.result and done.result["accepted"] else "refused, its parent stands in"
        losses = f"{amount(body, 'parent_loss'):.4f} -> {amount(body, 'loss'):.4f} bits per byte"
        await self._tell(f"the expert of {self._domain(job.number)} is done: {losses}, {gate}", node)
        if self.complete:
            await self._tell(f"all {len(self._jobs)} experts of the plan {self.plan.id[:8]} are there")
            await self._orders.give(self._involved())
        elif self.evaluation.wanted(node):
            await self._orders.give([node])

    def _declined(self) -> int | None:
        """A job that is still assigned to a site that has declined it."""
        return next((job.number for job in self._jobs.values() if job.node in job.declined and not job.result), None)

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
        return all(self._jobs[each] is work.jobs[each] for each in chain)

    async def _move(self, work: OpenWork, chains: Iterable[Chain], nodes: Iterable[str], why: str) -> None:
        """Let these sites train these chains, starting from the checkpoints that are kept."""
        touched: set[str] = set()
        for chain, node in zip(chains, nodes):
            if node != work.node(chain) and self._is_so(work, chain):
                touched |= {node, work.node(chain)}
                self._orders.owe({node, work.node(chain)})
                await self._put(self._jobs[each].moved(node) for each in chain)
                said = f"{self._of.sites[node].name} trains the expert of {self._called([chain])}"
                await self._tell(f"{said} {self.checkpoints.begin(chain)}: {why}", node, 30)
        if touched:
            await self._orders.give(touched - {""})
            await self._show()

    async def _strand(self, chains: Collection[Chain], declined: int | None, why: str) -> None:
        """No other site can train these chains: a declined one is left without a site, the others wait for theirs."""
        for chain in chains:
            if declined in chain:
                had = {self._jobs[each].node for each in chain}
                self._orders.owe(had)
                await self._put(self._jobs[each].moved("") for each in chain)
                await self._orders.give(had)
                await self._show()
        if chains:
            await self._tell(f"nobody else can train the experts of {self._called(chains)}: {why}", level=40)

    def _open_work(self) -> OpenWork:
        names = {site.node: site.name for site in self._of.sites.values()}
        kept = {number: self.checkpoints.step(number) for number in self._jobs}
        return OpenWork(self.plan, {**self._jobs}, {**self._steps}, kept, names)

    def _wanted(self, node: str) -> dict[str, Any]:
        """What the order to a site should say."""
        own = self._in_order(node)
        jobs, kept = [job_fields(self.plan.jobs[each].job) for each in own], map(self.checkpoints.of, own)
        checkpoints = [each.model_dump() for each in kept if each]
        told = {"plan": self.plan.id, "jobs": jobs, "complete": self.complete, "checkpoints": checkpoints}
        return {**told, **self.evaluation.wanted(node)}

    def _in_order(self, node: str | None = None) -> list[int]:
        """The jobs of a site, or of all (None), in the order of training: the shortest chain first."""
        chains = self.plan.queue()
        return [each for chain in chains for each in chain if node in (None, self._jobs[each].node)]

    async def _show(self) -> None:
        """Store a plan fact for the page: which site trains what from now on."""
        keys = ("number", "domain", "size", "steps", "planned_seconds", "done")
        rows = [(self._jobs[each].node, self._expert(each)) for each in self._in_order()]
        experts = [{"node": node, **{key: row[key] for key in keys}} for node, row in rows]
        head = {"plan": self.plan.id, "accepted": self._accepted, "mode": self.plan.mode, "seconds": self.plan.seconds}
        await self._of.store.add_facts([Fact(self._of.wall(), "plan", "", {**head, "experts": experts})])

    async def _put(self, jobs: Iterable[JobRow]) -> None:
        changed = [*jobs]
        await self._of.store.put_experts(self.plan.id, changed)
        for job in changed:
            self._jobs[job.number] = job
        await asyncio.to_thread(self.tidy, [job.number for job in changed])
        for job in changed:
            self._steps[job.number] = self.checkpoints.step(job.number)
        self.evaluation.follow(changed)

    async def _scored(self) -> None:
        """After something was scored or given up, give the sites their new orders."""
        await self._orders.give(self._involved())
        if self.evaluation.told()["finished"]:
            missing = self.evaluation.missing()
            lost = f"; missing: {', '.join(missing)}" if missing else ""
            await self._tell(f"the experts are scored{lost}", level=30 if missing else logging.INFO)

    def _involved(self) -> set[str]:
        """Node ids of the sites in the plan and of those that hold an order of it."""
        planned, named = {site.name for site in self.plan.sites}, self.expert_sites.names()
        return self._orders.holders() | {node for name, node in named.items() if name in planned}

    async def _tell(self, said: str, node: str = "", level: int = logging.INFO) -> None:
        await self._of.store.add_facts([event(self._of.wall(), said, node, level)])

    def _domain(self, index: int) -> str:
        return self.plan.jobs[index].job.domain.name

    def _called(self, chains: Iterable[Chain]) -> str:
        return ", ".join(self._domain(each) for chain in chains for each in chain)

    def _expert(self, index: int) -> dict[str, Any]:
        accepted, row = self.plan.jobs[index], self._jobs[index]
        site = self._of.sites.get(row.node)
        done = accepted.job.steps if row.result else self._steps.get(index, 0)
        told = {"domain": accepted.job.domain.name, "size": accepted.job.size, "steps": accepted.job.steps}
        place = {"number": index, "site": site.name if site else None, "done": done, "after": accepted.job.after}
        planned = self.expert_sites.seconds(accepted, site.name if site else accepted.site)
        return {**told, **place, "planned_seconds": planned, **(row.result or dict.fromkeys(RESULT))}
