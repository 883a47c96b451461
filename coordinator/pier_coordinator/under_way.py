"""A plan of experts under way: who trains which, who is done, and who takes over when things are not as planned."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pier.v1.coordinator_pb2 import ScoreSheet
from pier_coordinator.checkpoints import Checkpoints
from pier_coordinator.crew import Crew
from pier_coordinator.evaluation import Evaluation
from pier_coordinator.expert_orders import ExpertOrders
from pier_coordinator.experts.accepted import AcceptedPlan
from pier_coordinator.experts.exact import Limits
from pier_coordinator.experts.replan import replanned
from pier_coordinator.experts.scheduling import NoPlaceError
from pier_coordinator.facts import Fact
from pier_coordinator.fields import amount, text, whole
from pier_coordinator.open_work import Chain, OpenWork
from pier_coordinator.store.experts import RESULT, JobRow
from pier_coordinator.store.rows import event
from pier_node.coordination.expert_messages import job_fields
from pier_node.experts.scoring_order import ScoredDomain

if TYPE_CHECKING:
    from pier_coordinator.coordinator import Coordinator

LIMITS = Limits(seconds=2.0, gap=0.1)
"""Of planning anew: speeds are not known better than that."""


class UnderWay:
    """The plan that holds.

    Args:
        accepted: when, seconds since the epoch.

    Attributes:
        crew: the sites that train it; evaluation: of its experts; checkpoints: of those that are being trained.
    """

    def __init__(self, coordinator: Coordinator, plan: AcceptedPlan, accepted: float, jobs: Iterable[JobRow]) -> None:
        self._of, self.plan, self._accepted = coordinator, plan, accepted
        self._jobs = {job.number: job for job in jobs}
        self.checkpoints = Checkpoints(coordinator.store.folder, plan.id)
        self.tidy(self._jobs)
        self._steps = {number: self.checkpoints.step(number) for number in self._jobs}
        self._idle: set[str] = set()
        self._problems: dict[int, str] = {}
        self.crew = Crew(coordinator, plan, accepted)
        self.evaluation = Evaluation(coordinator, plan, accepted)
        self._orders = ExpertOrders(coordinator, plan.id, self._wanted)

    @property
    def complete(self) -> bool:
        """Whether all experts are there."""
        return all(job.result for job in self._jobs.values())

    @property
    def goes_on(self) -> bool:
        """Whether experts are being trained: it is not complete, and can be."""
        return not self.complete and all(job.node for job in self._jobs.values())

    async def begin(self) -> None:
        """Give the sites their jobs, from the start."""
        await asyncio.to_thread(self.checkpoints.clear)
        self._steps.clear()
        await self._show()
        await self._orders.give(self._involved())

    async def welcome(self, node: str) -> None:
        """A site registers: if it has come since, there may be something for it, when it has caught up with the run."""
        if not self.complete and node not in self._involved() and node in self.crew.names().values():
            await self._orders.give([node])

    async def heard(self, node: str, body: Mapping[str, Any]) -> None:
        """A site says how far it is with an expert; of an expert of another site it is not believed."""
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
            self.crew.paces.heard(node, job.number, step, amount(body, "seconds"), each.flops / each.steps)

    async def look(self, now: float) -> None:
        """Plan anew if a site is lost, has come, is not as fast as planned, or cannot or need not train."""
        if self.evaluation.look():
            await self._scored()
        if await self._orders.pay(self._involved):
            await self._show()
        if self.complete:
            return
        if (declined := self._declined()) is not None:
            problem = self._problems.get(declined, "its site has said so")
            await self._replan(f"it cannot be trained there: {problem}", declined=declined)
        elif lost := self.crew.look(now, {job.node for job in self._jobs.values() if job.node and not job.result}):
            names = ", ".join(sorted(self._of.sites[node].name for node in lost))
            await self._replan(f"{names} is silent for {self.plan.lost_after_s:.0f} s", lost)
        elif why := self.crew.outdated() or self._out_of_work():
            await self._replan(why)

    async def evaluate(self, extra: Sequence[ScoredDomain], rows: int, patience: float, folder: Path) -> None:
        """Have the sites score the experts; see Evaluation."""
        await self.evaluation.begin(self._jobs.values(), extra, rows, patience, folder)
        await self._orders.give(self._involved())

    async def delivered(self, node: str, sheet: ScoreSheet, content: bytes) -> None:
        """A score sheet has come, or why there is none. Raises Refused."""
        if await self.evaluation.take(node, sheet, content):
            await self._scored()

    def needs_checkpoint(self, node: str, number: int) -> bool:
        """Whether one of a job is of use, and the job that site's: until the chain that it is in is done."""
        job = self._jobs.get(number)
        return job is not None and job.node == node and not self.is_over(number)

    def is_over(self, number: int) -> bool:
        """Whether all of the chain that a job is in is done."""
        return all(self._jobs[each].result for each in self.plan.chain(number))

    def tidy(self, numbers: Iterable[int]) -> None:
        """Delete the checkpoints of these jobs that are of no use any more, and of those in their chains; blocks."""
        for number in numbers:
            if self.is_over(number):
                for each in self.plan.chain(number):
                    self.checkpoints.drop(each)

    def told(self) -> dict[str, Any]:
        """All of it, for people and scripts; None where nothing is known."""
        return {
            "plan": self.plan.id,
            "mode": self.plan.mode,
            "seconds": self.plan.seconds,
            "complete": self.complete,
            "experts": [self._expert(index) for index in sorted(self._jobs)],
        }

    # --- inside ----------------------------------------------------------------------------------

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
        """A job that is still at a site which cannot train it."""
        return next((job.number for job in self._jobs.values() if job.node in job.declined and not job.result), None)

    def _out_of_work(self) -> str:
        """Who has nothing left to train since the last look, while others have what they have not begun; "": nobody."""
        work, named = self._open_work(), self.crew.names()
        chains = work.chains()
        busy = {work.node(chain) for chain in chains}
        idle = {site.name for site in self.crew.here() if named[site.name] not in busy}
        new, self._idle = idle - self._idle, idle
        waits = any(work.node(chain) and not work.is_begun(chain) for chain in chains)
        return f"{min(new)} has nothing left to train" if new and waits else ""

    async def _replan(self, why: str, lost: Collection[str] = (), declined: int | None = None) -> None:
        """Experts go where all are done soonest; those that move go on from their checkpoints.

        Where there is no place for those of a lost site, they wait for it to come back, or for another one to come.
        Of what has changed while this was planned nothing is moved: the next look sees it.
        """
        work, sites, named = self._open_work(), self.crew.here(), self.crew.names()
        adrift = [
            chain
            for chain in work.chains()
            if work.node(chain) in ("", *self.crew.lost) or declined in chain  # whatever else is silent, is waited for
        ]
        moving = [chain for chain in work.chains() if chain in adrift or self._of.registry.is_here(work.node(chain))]
        rests = [work.remainder(chain, chain in adrift, sites) for chain in moving]
        stuck = [chain for chain, rest in zip(moving, rests) if not any(rest.job.fits(site) for site in sites)]
        placed = [rest for chain, rest in zip(moving, rests) if chain not in stuck]
        try:
            where = (await asyncio.to_thread(replanned, placed, sites, LIMITS)).places if placed else ()
        except NoPlaceError:
            stuck, where = moving, ()
        self.crew.planned_with(sites)
        nodes = [named[sites[place].name] for place in where]
        if any(self._of.sites[node].revoked_at is not None for node in nodes):
            await self._replan(why, lost, declined)
            return
        await self._move(work, [chain for chain in moving if chain not in stuck], nodes, why)
        given_up = [chain for chain in stuck if declined in chain or work.node(chain) in lost]
        await self._strand([chain for chain in given_up if self._is_so(work, chain)], declined, why)

    def _is_so(self, work: OpenWork, chain: Chain) -> bool:
        """Whether a chain is as it was when planning anew began."""
        return all(self._jobs[each] is work.jobs[each] for each in chain)

    async def _move(self, work: OpenWork, chains: Iterable[Chain], nodes: Iterable[str], why: str) -> None:
        """Have these sites train these experts, from the checkpoints that are kept of them."""
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
        """Nobody else can train these: what a site has declined nobody has, the rest waits for its site."""
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
        """What an order to a site says."""
        own = self._in_order(node)
        jobs, kept = [job_fields(self.plan.jobs[each].job) for each in own], map(self.checkpoints.of, own)
        checkpoints = [each.model_dump() for each in kept if each]
        told = {"plan": self.plan.id, "jobs": jobs, "complete": self.complete, "checkpoints": checkpoints}
        return {**told, **self.evaluation.wanted(node)}

    def _in_order(self, node: str | None = None) -> list[int]:
        """Jobs, or those of a site, as they are taken: the shortest chain first."""
        chains = self.plan.queue()
        return [each for chain in chains for each in chain if node in (None, self._jobs[each].node)]

    async def _show(self) -> None:
        """Tell the page who trains what from now on."""
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
        """Something was scored or given up: tell the sites what is wanted yet."""
        await self._orders.give(self._involved())
        if self.evaluation.told()["finished"]:
            missing = self.evaluation.missing()
            lost = f"; missing: {', '.join(missing)}" if missing else ""
            await self._tell(f"the experts are scored{lost}", level=30 if missing else logging.INFO)

    def _involved(self) -> set[str]:
        """Nodes of the sites that train, or were to."""
        planned, named = {site.name for site in self.plan.sites}, self.crew.names()
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
        planned = self.crew.seconds(accepted, site.name if site else accepted.site)
        return {**told, **place, "planned_seconds": planned, **(row.result or dict.fromkeys(RESULT))}
