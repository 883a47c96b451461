"""The training loop of a pipelined run: an iteration plan, an attempt, and a round that decides whether it counts.

The counterpart of training.py. The round (rounds/member.py) makes an iteration atomic: either all sites of the plan
take the step that they computed and stored, or none does, and the next round tries again without the sites that failed.
`book` notes the time and tokens of these rounds in the same way as other runs, so that the page, `status` and the
metrics can sum over sites.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

import torch

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.base.tasks import Signal
from pier_node.config.run import RunConfig
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_node.outer.times import Spans, Times
from pier_node.pipeline import vote_state
from pier_node.pipeline.attempt import Attempt, AttemptResult
from pier_node.pipeline.context import Position, Tools
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import Dispatch, Joint, Overflow
from pier_node.pipeline.outer_step import Met, ReplicaRound, step_of
from pier_node.pipeline.path_search import Search, search_apart
from pier_node.pipeline.plan_delivery import Routing
from pier_node.pipeline.planner import Planner, Told
from pier_node.pipeline.stage import Stage
from pier_node.pipeline.stage_state import StageState, StateSharing, holders, joined
from pier_node.pipeline.vote_state import Turn
from pier_node.rounds.catch_up import CatchUp
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.state_store import Checkpoint
from pier_node.rounds.suspects import NOBODY, Behind, Suspicion
from pier_node.site.loop import Orders, Work
from pier_node.wire.carrier import PeerLost
from pier_proto.v1.peer_pb2 import Phase, Place

CLEAR = 4
"""A transfer that takes this many times as long as an empty message measures the bandwidth of its link."""


def book(progress: Progress, node: str, each: int, seconds: float, spans: Spans | None, plan: Plan | None) -> None:
    """Book a round of a site, its time and its tokens, in its progress.

    Args:
        each: number of tokens of a microbatch.
        seconds: that the round took.
        spans: timing of this site's attempt in the round; None: it made none.
        plan: plan of the attempt, if it counted; None: all work on it was in vain.
    """
    compute, exchange, lost = 0.0, 0.0, 0.0
    if spans and plan is None:
        lost = seconds
    elif spans:
        compute, exchange = spans.computing + spans.step, spans.average
    progress.compute += compute
    progress.waited += seconds - compute
    progress.times = Times(max(seconds - compute - exchange - lost, 0.0), exchange, lost)
    progress.steps = 1 if plan and not plan.message.meet else 0
    if progress.steps:
        tokens = share(plan, node, each)
        progress.tokens += tokens
        progress.tokens_per_second = tokens / seconds if seconds else 0.0


def share(plan: Plan | None, node: str, each: int) -> int:
    """A site's tokens of an iteration, if one counted: the sites on a microbatch's path share its tokens equally."""
    if plan is None or plan.message.meet:
        return 0
    return round(sum(each / plan.length(microbatch) for microbatch in plan.visitors(node)))


def lines(transfers: Mapping[str, float], round_trips: Mapping[str, float], size: float) -> dict[str, float]:
    """Bandwidth to other sites in bytes per second, by node, for the links whose transfers measure it.

    Args:
        transfers: seconds for a tensor of `size` bytes, the mean of both directions, by node.
        round_trips: seconds for an empty message and its answer, by node.
    """
    known = {node: seconds for node, seconds in transfers.items() if node in round_trips}
    return {node: size / seconds for node, seconds in known.items() if seconds > CLEAR * round_trips[node]}


HOPELESS = 4
"""Attempts at a step whose results here are not finite or too large, after which training has diverged."""
REPLICAS = 10.0
"""Seconds to wait for a replica of this stage that has the version that counts."""

log = logging.getLogger(__name__)

Committed = Callable[[OuterState], Awaitable[None]]


class PipelineTraining(Work):
    """The training loop of a site, from the state that `rounds` holds to the end of the run.

    Args:
        on_commit: awaited after each round with the state of the run.
        on_end: awaited at the sites of stage 0 with the joined model, as a checkpoint.
        on_plan: called with new paths, if this site plans them.
        orders: the operator's orders.
        search: finds the paths.
    """

    def __init__(
        self,
        config: RunConfig,
        rounds: Rounds,
        stage_state: StageState,
        tools: Tools,
        progress: Progress,
        device: torch.device,
        on_commit: Committed,
        on_end: Callable[[Checkpoint], Awaitable[None]],
        on_plan: Told,
        orders: Orders,
        search: Search = search_apart,
    ) -> None:
        self._config, self._rounds, self._stage_state, self._tools = config, rounds, stage_state, tools
        self._roster, self._carrier, self.progress, self._device = tools.roster, tools.carrier, progress, device
        self._on_commit, self._on_end, self._orders = on_commit, on_end, orders
        self._stage: Stage | None = None
        self._attempt: Joint[AttemptResult | Met] | None = None
        self._tried: Plan | None = None
        self._version, self._begun_last, self._overflows = 0, b"", (0, list[str]())
        self._news, stages = Signal(), config.pipeline.stages
        self.gives = stage_state.beginnings.gives()
        self._planner = Planner(config.pipeline, config.run.seed, config.full_from, on_plan, search)
        self._position = Position(config, rounds)
        self._routing = Routing(tools, self._planner, stage_state, self._position, self._news)
        under_way, over = (lambda: self._attempt), lambda: self._rounds.state.round
        take, begun = rounds.take_stream, lambda: self._begun_last
        self._dispatch = Dispatch(self._carrier, take, under_way, begun, over, self._news)
        StateSharing(self._carrier, rounds, stage_state, stages)
        length = vote_state.length(stages)
        self._catch_up = CatchUp(self._carrier, self._roster, tools.faults, length)

    def place(self) -> Place | None:
        """This site's place in the pipeline, for its pulse."""
        stage_state, pace = self._stage_state, self._tools.pace
        if stage_state.stage is None:
            return None
        times = {kind: pace[kind] for kind in ("forward", "backward", "loss")}
        memory, counts = self._config.pipeline.memory, self._position.voted.versions[stage_state.stage]
        return Place(
            stage=stage_state.stage,
            version=stage_state.version_of(counts),
            memory=memory,
            working=self._attempt is not None,
            transfer=pace.transfers(),
            round_trip=self._roster.round_trips(),
            **times,
        )

    def tokens_after(self, state: OuterState) -> int:
        """Tokens that this site has trained on when a state counts that is not settled yet."""
        return self.progress.tokens + share(self._counted(state), self._carrier.node, self._config.step_tokens)

    # --- what the site's loop calls --------------------------------------------------------------

    async def begin(self) -> None:
        """Take up the stage that is on disk, if there is one."""
        self._tell_progress()
        self.progress.phase = Phase.PHASE_CATCHING_UP
        state, counted = self._rounds.state, self._position.voted.counted
        ready = state.ledger.get(self._carrier.node, 0)
        await asyncio.to_thread(self._stage_state.own.resume, state.round, counted, ready)

    def due(self) -> bool:
        """Whether there is another iteration."""
        return self._position.turn is not None

    def behind(self) -> bool:
        """Whether other sites are ahead, and their state can be taken now."""
        return not self._tools.stuck and bool(self._rounds.sources())

    async def catch_up(self) -> None:
        """Continue from the newest state of the run. The stored step of this site counts if that state says so."""
        self.progress.phase = Phase.PHASE_CATCHING_UP
        fetched = await self._catch_up.newest(self._rounds.sources, self._rounds.trust, self._rounds.state)
        if fetched is not None:
            await self._rounds.adopt(fetched.state, fetched.proof)
            await self._settle()
            await self._on_commit(fetched.state)  # after a restart, stored steps are of the round after the one on disk

    async def step(self) -> None:
        """Take part in an iteration and its round. Raises PierError when training cannot continue."""
        if self._tools.stuck:
            await self._tools.freed(self.progress)
        else:
            await self._align()
            await self._round()

    async def finish(self) -> None:
        """Join the stages into the whole model, at the sites of stage 0."""
        await self._align()
        if self._stage_state.stage == 0:
            await self._on_end(await joined(self._config, self._rounds.state, self._stage_state, self._tools))

    async def close(self) -> None:
        """End the search for paths."""
        await self._planner.searching.close()

    # --- one round -------------------------------------------------------------------------------

    async def _round(self) -> None:
        rounds, progress = self._rounds, self.progress
        progress.training_for, progress.phase = rounds.coming(), Phase.PHASE_TRAINING
        self._tried, self._version, began = None, 0, asyncio.get_running_loop().time()
        update = await self._work()
        worked = asyncio.get_running_loop().time()
        progress.phase, sites = Phase.PHASE_WAITING, 1 if rounds.state.round else self._config.run.sites
        try:
            state = await rounds.commit(update, self._advanced, sites)
        except Behind:
            ended = asyncio.get_running_loop().time()
            await self.catch_up()
            self._book(began, worked, ended)
        else:
            self._book(began, worked, asyncio.get_running_loop().time())
            await self._settle()
            await self._on_commit(state)
            await self._tools.faults.reach(state.round, "saved")

    def _advanced(self, state: OuterState, exchanged: SharedVector, tokens: Mapping[str, int]) -> OuterState:
        """The state after a round. Raises Suspicion: what others bring to a round must not end this site."""
        try:
            return vote_state.advance(self._config, state, exchanged, tokens)
        except Exception as error:
            log.exception("round %d has no result", state.round + 1)
            raise Suspicion(NOBODY, f"the round has no result: {error!r}") from error

    def _book(self, began: float, worked: float, ended: float) -> None:
        """Book a round that is decided and known here."""
        self.progress.round_time = ended - worked
        spans, counted = self.progress.spans if self._tried else None, self._counted(self._rounds.state)
        book(self.progress, self._carrier.node, self._config.step_tokens, ended - began, spans, counted)
        self._version = 0

    def _counted(self, state: OuterState) -> Plan | None:
        """The plan of this site's attempt, if it counts in a state and is not booked yet."""
        return self._tried if self._version and self._version == vote_state.vote_state_of(state).counted else None

    async def _work(self) -> Update:
        """Take part in an attempt. Returns this site's update for the round."""
        stages, least = self._config.pipeline.stages, 1 if self._dealt else self._config.run.sites
        plan = await self._routing.plan(least, lambda: bool(self._rounds.sources()) or self._orders.paused)
        if plan is None:
            return vote_state.not_ready(stages)
        if self._carrier.node not in plan.stages:
            await self._routing.over(plan, lambda: bool(self._rounds.sources()))
            return vote_state.not_ready(stages)
        apart = self._position.turn is Turn.APART
        try:
            result = await self._attempted(plan, apart)
        except Suspicion as suspicion:
            if self._has_diverged(plan, suspicion):
                raise PierError(
                    f"step {plan.message.step + 1}: training diverged: {suspicion.reason}",
                    "Found a new run with a lower inner.lr; this one's last checkpoint is as it was.",
                ) from suspicion
            log.warning("round %d: step %d is tried again: %s", plan.round, plan.message.step + 1, suspicion)
            self._routing.suspect = suspicion.node
            return vote_state.not_ready(stages)
        began = asyncio.get_running_loop().time()
        self._version = await asyncio.to_thread(self._keep, plan, result, apart)
        if self.progress.spans:
            self.progress.spans.step = asyncio.get_running_loop().time() - began
        await self._tools.faults.reach(plan.round, "prepared")
        return vote_state.ready(plan, result.total, stages, apart)

    def _has_diverged(self, plan: Plan, suspicion: Suspicion) -> bool:
        """Whether an attempt failed because training diverged: without what others sent, or with what several sent."""
        if not isinstance(suspicion, Overflow) or suspicion.own:
            return isinstance(suspicion, Overflow)
        step, senders = self._overflows
        senders = [*(senders if step == plan.message.step else []), suspicion.node]
        self._overflows = plan.message.step, senders
        return len({*senders} - {NOBODY}) > 1 or len(senders) >= HOPELESS

    @property
    def _dealt(self) -> bool:
        """Whether any site is known to have a stage. Before that, rounds may be empty, because of a pause."""
        places = any(it.HasField("place") for it in self._roster.pulses().values())
        return places or self._stage_state.stage is not None or any(self._position.voted.versions)

    async def _attempted(self, plan: Plan, apart: bool) -> AttemptResult | Met:
        attempt = self._attempt = self._begun(plan, await self._built(), apart)
        self._begun_last, self._tried = plan.name, plan
        if dropped := self._dispatch.dropped(plan):
            attempt.drop(dropped)
        self._news.notify()
        self.progress.spans = attempt.spans
        try:
            await self._tools.faults.reach(plan.round, "routed")
            return await attempt.run()
        finally:
            self._attempt = None

    def _begun(self, plan: Plan, stage: Stage, apart: bool) -> Joint[AttemptResult | Met]:
        if not plan.message.meet:
            return Attempt(self._tools, plan, stage, apart)
        step, base = step_of(self._config.outer, plan.message.step / self._config.inner.total_steps), self._stage_state
        assert base.state
        return ReplicaRound(self._tools, plan, step, base.state, partial(base.brought, step))

    async def _built(self) -> Stage:
        """The stage to compute with, loaded with the weights of its state."""
        if self._stage is None and (number := self._stage_state.stage) is not None:
            await self._tools.prepare(number)
            stage = await self._tools.compute(lambda: Stage(self._config, number, self._device))
            await self._load_into(stage)
            self._stage = stage
        assert self._stage
        return self._stage

    async def _load(self) -> None:
        """Load the weights of the state if the stage is built.

        If loading does not finish, the stage is built again later.
        """
        if stage := self._stage:
            self._stage = None
            with suppress(Suspicion):
                await self._load_into(stage)
                self._stage = stage

    async def _load_into(self, stage: Stage) -> None:
        if self._stage_state.state:
            weights = torch.from_numpy(self._stage_state.working.anchor)
            await self._tools.compute(lambda: stage.load(weights))

    def _keep(self, plan: Plan, result: AttemptResult | Met, apart: bool) -> int:
        """Store the step that this site would take, before it votes ready. Returns its version. Blocks."""
        stage_state, mine, step = self._stage_state, plan.weights[self._carrier.node], plan.message.step
        version = vote_state.version(plan.round, vote_state.tag_of(vote_state.name_of(plan, result.total)))
        if isinstance(result, Met):
            if result.tensors:
                stage_state.meet(result.tensors, version, result.error)
        elif apart and mine:
            stage_state.step_apart(result.gradient, result.total, step, version, mine)
        elif not apart and stage_state.stage in plan.visited:
            stage_state.stepped(result.gradient, result.total, step, version)
        return version

    async def _settle(self) -> None:
        """After a round: take the stored step if it counts."""
        moved = await asyncio.to_thread(self._stage_state.settle, self._position.voted, self._rounds.state.round)
        if moved or (self._tried and self._tried.message.meet):  # before an outer round, forget diverged weights
            await self._load()
        self._tell_progress()

    def _tell_progress(self) -> None:
        voted = self._position.voted
        self.progress.inner_step, self.progress.loss = voted.steps, voted.loss if voted.steps else math.nan

    # --- left behind -----------------------------------------------------------------------------

    async def _align(self) -> None:
        """Get the version of the stage state that counts, from disk or a replica, or let the run continue without."""
        stage_state = self._stage_state
        if stage_state.stage is None:
            return
        wanted = self._position.voted.versions[stage_state.stage]
        if stage_state.state and stage_state.version == wanted:
            return
        if not await asyncio.to_thread(stage_state.load, wanted):
            await self._align_from_replicas(stage_state.stage, wanted)
        await self._load()

    async def _align_from_replicas(self, stage: int, wanted: int) -> None:
        self.progress.phase = Phase.PHASE_CATCHING_UP  # the planner waits for it, for a while
        try:
            await self._stage_state.fetch(wanted, self._carrier, await holders(self._tools, stage, wanted, REPLICAS))
            log.info("stage %d is here as it is after the last step" if wanted else "stage %d is here", stage)
        except PeerLost as lost:
            what = "as it was after its last step" if wanted else "yet, it comes from the run's founder"
            log.warning("stage %d is not here %s: %s", stage, what, lost.reason)
