"""A site's way through a pipelined run: a plan, an attempt, a round that decides whether it counts, and so on.

A sibling of pier_node/training.py. The round (outer/round.py) makes an iteration atomic: either all sites of the plan
take the step that they have worked out and kept, or nobody does, and the next round tries again without whoever failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

import torch

from pier.v1.peer_pb2 import Phase, Place
from pier_node.catch_up import CatchUp
from pier_node.checkpoint import Checkpoint
from pier_node.config import RunConfig
from pier_node.errors import PierError
from pier_node.orders import Orders
from pier_node.outer.contribution import Contribution
from pier_node.outer.round import Rounds
from pier_node.outer.state import OuterState
from pier_node.outer.suspicion import Behind, Suspicion
from pier_node.pipeline import tally
from pier_node.pipeline.account import Account
from pier_node.pipeline.attempt import Attempt, Worth
from pier_node.pipeline.dispatch import Dispatch, States
from pier_node.pipeline.itinerary import Plan
from pier_node.pipeline.joining import joined
from pier_node.pipeline.joint import Diverged, Joint
from pier_node.pipeline.outer_step import step_of
from pier_node.pipeline.planner import Planner, Told
from pier_node.pipeline.replica_round import Met, ReplicaRound
from pier_node.pipeline.routing import Routing
from pier_node.pipeline.search_process import search_apart
from pier_node.pipeline.searching import Search
from pier_node.pipeline.stage import Stage
from pier_node.pipeline.tools import Tools, holders
from pier_node.pipeline.turn import Turn, turn_of
from pier_node.pipeline.vault import Vault
from pier_node.progress import Progress
from pier_node.signals import Signal
from pier_node.wire.carrier import PeerLost

REPLICAS = 10.0
"""Seconds to wait until a replica of our stage says that it has the version that counts."""

log = logging.getLogger(__name__)

Committed = Callable[[OuterState], Awaitable[None]]


class PipelineTraining:
    """The loop of a site, from the state that `rounds` holds to the end of the run.

    Args:
        on_commit: awaited after each round with the state of the run.
        on_end: awaited at the sites of stage 0 with the joined model, as a checkpoint.
        on_plan: told of new paths, if this site plans them; `search` finds them.
        orders: of the run's operator.
    """

    def __init__(
        self,
        config: RunConfig,
        rounds: Rounds,
        vault: Vault,
        tools: Tools,
        progress: Progress,
        device: torch.device,
        on_commit: Committed,
        on_end: Callable[[Checkpoint], Awaitable[None]],
        on_plan: Told,
        orders: Orders,
        search: Search = search_apart,
    ) -> None:
        self._config, self._rounds, self._vault, self._tools = config, rounds, vault, tools
        self._roster, self._carrier, self.progress, self._device = tools.roster, tools.carrier, progress, device
        self._on_commit, self._on_end, self._orders = on_commit, on_end, orders
        self._stage: Stage | None = None
        self._attempt: Joint[Worth | Met] | None = None
        self._tried: Plan | None = None
        self._version, self._begun_last = 0, b""
        self._account = Account(progress, self._carrier.node, config.inner.batch_size * config.model.context)
        self._news, stages = Signal(), config.pipeline.stages
        self._planner = Planner(config.pipeline, config.run.seed, on_plan, search)
        run = rounds.coming, self._standing, lambda: self._turn() is Turn.MEET, self._news
        self._routing = Routing(self._carrier, self._roster, self._planner, vault, stages, *run)
        under_way, over = (lambda: self._attempt), lambda: self._rounds.state.round
        Dispatch(self._carrier, rounds.streams.take, under_way, lambda: self._begun_last, over, self._news)
        States(self._carrier, rounds.offer, lambda: (vault.stage, vault.state), vault.moments)
        self._catch_up = CatchUp(self._carrier, self._roster, tools.faults, tally.length(stages))

    def place(self) -> Place | None:
        """What this site is to the pipeline, for its pulse."""
        vault, pace = self._vault, self._tools.pace
        if vault.stage is None:
            return None
        times = {kind: pace[kind] for kind in ("forward", "backward", "loss")}
        memory, counts = self._config.pipeline.memory, self._standing().versions[vault.stage]
        return Place(
            stage=vault.stage,
            version=vault.version_of(counts),
            memory=memory,
            working=self._attempt is not None,
            transfer=pace.transfers(),
            round_trip=self._roster.round_trips(),
            **times,
        )

    async def run(self) -> None:
        """Train to the end of the run. Raises PierError when it cannot go on."""
        try:
            await self._train()
        finally:
            await self._planner.searching.close()

    async def _train(self) -> None:
        self._tell_progress()
        self.progress.phase = Phase.PHASE_CATCHING_UP
        await asyncio.to_thread(self._vault.own.resume, self._rounds.state.round)
        while self._turn():
            if self._orders.paused:
                await self._orders.resumed(self.progress, self._roster)
            elif self._tools.stuck:
                await self._tools.freed(self.progress)
            elif self._rounds.leaders():
                await self._fetch()
            else:
                await self._align()
                await self._round()
        await self._align()
        if self._vault.stage == 0:
            await self._on_end(await joined(self._config, self._rounds.state, self._vault, self._tools))
        self.progress.phase = Phase.PHASE_DONE

    def _standing(self) -> tally.Standing:
        return tally.standing(self._rounds.state)

    def _turn(self) -> Turn | None:
        return turn_of(self._config, self._standing())

    # --- one round -------------------------------------------------------------------------------

    async def _round(self) -> None:
        rounds, progress = self._rounds, self.progress
        progress.training_for, progress.phase = rounds.coming(), Phase.PHASE_TRAINING
        self._tried, self._version, began = None, 0, asyncio.get_running_loop().time()
        contribution = await self._work()
        worked = asyncio.get_running_loop().time()
        progress.phase, rounds.sites = Phase.PHASE_WAITING, 1 if rounds.state.round else self._config.run.sites
        try:
            state = await rounds.commit(contribution, tally.advance)
        except Behind:
            ended = asyncio.get_running_loop().time()
            await self._fetch()
            self._book(began, worked, ended)
        else:
            self._book(began, worked, asyncio.get_running_loop().time())
            await self._settle()
            await self._on_commit(state)
            await self._tools.faults.reach(state.round, "saved")

    def _book(self, began: float, worked: float, ended: float) -> None:
        """A round is decided, and known here."""
        tried, counted = self._tried, self._version and self._version == self._standing().counted
        self.progress.round_time = ended - worked
        self._account.book(ended - began, self.progress.spans if tried else None, tried if counted else None)

    async def _work(self) -> Contribution:
        """Take part in an attempt; what this site brings to the round."""
        stages, least = self._config.pipeline.stages, 1 if self._dealt else self._config.run.sites
        plan = await self._routing.plan(least, lambda: bool(self._rounds.leaders()) or self._orders.paused)
        if plan is None:
            return tally.not_ready(stages)
        if self._carrier.node not in plan.stages:
            await self._routing.over(plan, lambda: bool(self._rounds.leaders()))
            return tally.not_ready(stages)
        apart = self._turn() is Turn.APART
        try:
            worth = await self._attempted(plan, apart)
        except Diverged as diverged:
            raise PierError(
                f"step {plan.message.step + 1}: training diverged: {diverged.reason}",
                "Found a new run with a lower inner.lr; this one's last checkpoint is as it was.",
            ) from diverged
        except Suspicion as suspicion:
            log.warning("round %d: step %d is tried again: %s", plan.round, plan.message.step + 1, suspicion)
            self._routing.suspect = suspicion.node
            return tally.not_ready(stages)
        began = asyncio.get_running_loop().time()
        self._version = await asyncio.to_thread(self._keep, plan, worth, apart)
        if self.progress.spans:
            self.progress.spans.step = asyncio.get_running_loop().time() - began
        await self._tools.faults.reach(plan.round, "prepared")
        return tally.ready(plan, worth.total, stages, apart)

    @property
    def _dealt(self) -> bool:
        """Whether any site was given a stage yet, as far as one knows: rounds may be empty before, of a pause."""
        places = any(it.HasField("place") for it in self._roster.pulses().values())
        return places or self._vault.stage is not None or any(self._standing().versions)

    async def _attempted(self, plan: Plan, apart: bool) -> Worth | Met:
        attempt = self._attempt = self._begun(plan, await self._built(), apart)
        self._begun_last, self._tried = plan.name, plan
        self._news.notify()
        self.progress.spans = attempt.spans
        try:
            await self._tools.faults.reach(plan.round, "routed")
            return await attempt.run()
        finally:
            self._attempt = None

    def _begun(self, plan: Plan, stage: Stage, apart: bool) -> Joint[Worth | Met]:
        if not plan.message.meet:
            return Attempt(self._tools, plan, stage, apart)
        step = step_of(self._config.outer, plan.message.step / self._config.inner.total_steps)
        return ReplicaRound(self._tools, plan, self._vault, step)

    async def _built(self) -> Stage:
        """The stage at work, with the weights of its state."""
        if self._stage is None and (number := self._vault.stage) is not None:
            await self._tools.prepare(number)
            stage = await self._tools.compute(lambda: Stage(self._config, number, self._device))
            await self._load_into(stage)
            self._stage = stage
        assert self._stage
        return self._stage

    async def _load(self) -> None:
        """The weights of its state, if the stage is built; where that does not end it is built anew."""
        if stage := self._stage:
            self._stage = None
            with suppress(Suspicion):
                await self._load_into(stage)
                self._stage = stage

    async def _load_into(self, stage: Stage) -> None:
        if self._vault.state:
            weights = torch.from_numpy(self._vault.working.anchor)
            await self._tools.compute(lambda: stage.load(weights))

    def _keep(self, plan: Plan, worth: Worth | Met, apart: bool) -> int:
        """Keep the step that this site would take, before it says that it is ready; its version. Blocks."""
        vault, mine, step = self._vault, plan.weights[self._carrier.node], plan.message.step
        version = tally.version(plan.round, tally.tag_of(tally.name_of(plan, worth.total)))
        if isinstance(worth, Met):
            if worth.tensors:
                vault.meet(worth.tensors, version)
        elif apart and mine:
            vault.step_apart(worth.gradient, worth.total, step, version, mine)
        elif not apart and vault.stage in plan.visited:
            vault.stepped(worth.gradient, worth.total, step, version)
        return version

    async def _settle(self) -> None:
        """After a round: take the staged step if it counts."""
        moved = await asyncio.to_thread(self._vault.settle, self._standing(), self._rounds.state.round)
        if moved or (self._tried and self._tried.message.meet):  # what went astray is forgotten before an outer round
            await self._load()
        self._tell_progress()

    def _tell_progress(self) -> None:
        standing = self._standing()
        self.progress.inner_step, self.progress.loss = standing.steps, standing.loss if standing.steps else math.nan

    # --- left behind -----------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Go on from the newest state of the run; our staged step counts if that says so."""
        self.progress.phase = Phase.PHASE_CATCHING_UP
        fetched = await self._catch_up.newest(self._rounds.leaders, moments=False)
        if fetched is not None:
            await self._rounds.adopt(fetched.state)
            await self._settle()
            await self._on_commit(fetched.state)  # after a start, kept steps are of the round after that on the disk

    async def _align(self) -> None:
        """Have the version of our stage that counts: from the disk, or from a replica; else the run goes on without."""
        vault = self._vault
        if vault.stage is None:
            return
        wanted = self._standing().versions[vault.stage]
        if vault.state and vault.version == wanted:
            return
        if not await asyncio.to_thread(vault.load, wanted):
            await self._align_from_replicas(vault.stage, wanted)
        await self._load()

    async def _align_from_replicas(self, stage: int, wanted: int) -> None:
        self.progress.phase = Phase.PHASE_CATCHING_UP  # the planner waits for it, for a while
        try:
            await self._vault.fetch(wanted, self._carrier, await holders(self._tools, stage, wanted, REPLICAS))
            log.info("stage %d is here as it is after the last step", stage)
        except PeerLost as lost:
            log.warning("stage %d is not here as it was after its last step: %s", stage, lost.reason)
