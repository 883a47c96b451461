"""A site's way through a run: train, bring what was learnt to a round, take its result; catch up when left behind."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pier.v1.peer_pb2 import Phase
from pier_node.checkpoint import Checkpoint
from pier_node.config import RunConfig
from pier_node.errors import PierError
from pier_node.faults import NO_FAULTS, Faults
from pier_node.model.layout import Layout
from pier_node.outer.advance import advance
from pier_node.outer.attempt import Contribution, norm_limit
from pier_node.outer.deadline import Backoff
from pier_node.outer.pier import pseudo_gradient
from pier_node.outer.round import Behind, Rounds
from pier_node.outer.schedule import Kind, RoundPlan, round_plan, total_rounds
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, OuterState
from pier_node.progress import Progress
from pier_node.roster import Roster
from pier_node.shared import SharedVector
from pier_node.trainer import Step, Trainer
from pier_node.wire.carrier import Carrier, PeerLost
from pier_node.wire.partial import Partial
from pier_node.wire.transfer import Fetched, fetch_state

SILENCE = 20.0
"""Seconds that a peer may be silent in a state transfer."""

log = logging.getLogger(__name__)


@dataclass
class Pending:
    """What this site learnt and no round has taken: Δ in `vector`, shape [parameters]; void without tokens."""

    vector: SharedVector
    tokens: int = 0


class Training:
    """The loop of a site, from the state that `rounds` holds to the end of the run.

    Args:
        on_commit: awaited after each round with what a checkpoint would hold.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        carrier: Carrier,
        roster: Roster,
        rounds: Rounds,
        trainer: Trainer,
        progress: Progress,
        on_commit: Callable[[Checkpoint], Awaitable[None]],
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._config, self._layout, self._carrier = config, layout, carrier
        self._roster, self._rounds, self._trainer = roster, rounds, trainer
        self._on_commit, self._faults = on_commit, faults
        self.progress = progress
        self._pending = Pending(SharedVector(layout.length))
        self._start: SharedVector | None = None
        self._adam_step = 0
        self._load_adam = False
        self._late = False

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was taken: moments, counters, and what no round had taken."""
        self._take_moments(checkpoint.adam_m, checkpoint.adam_v, checkpoint.adam_step)
        state = checkpoint.state
        if ADAM_M in state.tensors:
            self._take_moments(state.tensors[ADAM_M], state.tensors[ADAM_V], state.adam_step)
        self.progress.inner_step, self.progress.tokens = checkpoint.inner_step, checkpoint.tokens
        if checkpoint.pending is not None:
            self._pending = Pending(checkpoint.pending, checkpoint.pending_tokens)
            self._start_from_pending()

    def snapshot(self) -> Checkpoint:
        """This site at rest: valid while its workers are not publishing."""
        state, pending = self._rounds.state, self._pending
        own = ADAM_M not in state.tensors and self._adam_step > 0
        return Checkpoint(
            state=state,
            adam_m=self._trainer.adam_m if own else None,
            adam_v=self._trainer.adam_v if own else None,
            adam_step=self._adam_step if own else 0,
            inner_step=self.progress.inner_step,
            tokens=self.progress.tokens,
            pending=pending.vector if pending.tokens else None,
            pending_tokens=pending.tokens,
        )

    async def run(self) -> None:
        """Train to the end of the run. Raises PierError when it cannot go on."""
        last = total_rounds(self._config)
        while self._rounds.state.round < last:
            if self._roster.ahead(self._rounds.state.round):
                await self.catch_up()
            else:
                await self._round(round_plan(self._config, self._rounds.state.round + 1))
        self.progress.phase = Phase.PHASE_DONE

    # --- one round -----------------------------------------------------------------------------

    async def _round(self, plan: RoundPlan) -> None:
        tokens = await self._train(plan)
        contribution = await asyncio.to_thread(self._contribution, plan, tokens)
        step = partial(advance, plan=plan, layout=self._layout, inner=self._config.inner)
        self.progress.phase = Phase.PHASE_WAITING
        last, began = self._rounds.state, asyncio.get_running_loop().time()
        try:
            if plan.kind is Kind.SOLO:
                await self._rounds.commit_alone(contribution, step)
            else:
                self._rounds.sites = self._config.run.sites if plan.first_exchange else 1
                await self._rounds.commit(contribution, step)
        except Behind as behind:
            log.info("round %d went on without this site: catching up from %s", plan.round, ", ".join(behind.peers))
            return
        finally:  # also when stopped on the way: a checkpoint holds Δ until it is in the anchor, and not for longer
            self.progress.round_time = asyncio.get_running_loop().time() - began
            self.progress.waited += self.progress.round_time
            self._carry(last, self._rounds.state)
        self._late = False
        await self._settled(plan)

    async def _train(self, plan: RoundPlan) -> int:
        """Do the round's inner steps. Returns the tokens trained on."""
        steps = self._steps_worth_doing(plan)
        start = self._start or self._rounds.state.tensors[ANCHOR]
        if steps == 0:
            self._trainer.outbox.array[:] = start.array
            return 0
        self.progress.phase = Phase.PHASE_TRAINING
        before = self.progress.tokens
        report = await self._trainer.run(
            first_step=plan.first_step + plan.steps - steps,
            steps=steps,
            sequences=self._config.inner.batch_size * (self._config.run.sites if plan.kind is Kind.SOLO else 1),
            payload="gradient" if plan.kind is Kind.SYNC else "weights",
            load=start,
            adam_step=self._adam_step if self._load_adam else None,
            on_progress=partial(self._stepped, before),
        )
        if plan.kind is not Kind.SYNC:
            self._load_adam, self._adam_step = False, report.adam_step
        self.progress.tokens = before + report.tokens
        self.progress.compute += report.seconds
        self.progress.inner_step = plan.first_step + plan.steps
        return report.tokens

    def _stepped(self, tokens_before: int, step: Step) -> None:
        progress = self.progress
        progress.inner_step, progress.loss = step.step + 1, step.loss
        progress.tokens = tokens_before + step.tokens
        progress.tokens_per_second = step.tokens / step.seconds if step.seconds > 0 else 0.0

    def _steps_worth_doing(self, plan: RoundPlan) -> int:
        """All of them; a site that has just caught up does as many as the furthest of the others has left."""
        if plan.kind is Kind.SYNC or not self._late:
            return plan.steps
        others = [self._roster.pulse_of(node) for node in self._roster.participants() if node != self._carrier.node]
        done = max((pulse.inner_step - plan.first_step for pulse in others if pulse), default=0)
        return min(max(plan.steps - done, 0), plan.steps)

    def _contribution(self, plan: RoundPlan, tokens: int) -> Contribution:
        vector = self._trainer.outbox.array
        if plan.kind is Kind.LOCAL:
            pseudo_gradient(self._rounds.state.anchor, vector, out=self._pending.vector.array)
            self._pending.tokens += tokens
            vector, tokens = self._pending.vector.array, self._pending.tokens
        norm, limit = float(np.sqrt(np.dot(vector, vector))), norm_limit(self._rounds.state.anchor)
        if plan.kind is Kind.SOLO and not math.isfinite(norm):
            raise PierError(
                f"round {plan.round}: training diverged: the weights are not finite any more",
                "Found a new run with a lower inner.lr; this one's last checkpoint is as it was.",
            )
        if plan.kind is Kind.SOLO or norm <= limit:
            return Contribution(vector, tokens)
        log.error("round %d: this site's update is dropped: its norm is %.3g: lower inner.lr?", plan.round, norm)
        self._forget(plan)
        return Contribution(np.zeros_like(vector), 0)

    def _forget(self, plan: RoundPlan) -> None:
        """Training went astray here: go on from the anchor, and with no moments that would lead there again."""
        self._pending.tokens, self._start = 0, None
        if plan.kind is Kind.LOCAL:
            self._trainer.adam_m.array.fill(0)
            self._trainer.adam_v.array.fill(0)
            self._adam_step, self._load_adam = 0, True

    async def _settled(self, plan: RoundPlan) -> None:
        state = self._rounds.state
        if plan.kind is Kind.SYNC and state.round < total_rounds(self._config):
            self._take_moments(state.tensors[ADAM_M], state.tensors[ADAM_V], state.adam_step)
        self._assert_agreement(state)
        every, last = self._config.inner.eval_every, state.round == total_rounds(self._config)
        if last or (every and state.round % every == 0):
            await self.validate()
        await self._on_commit(self.snapshot())
        await self._faults.reach(state.round, "saved")

    async def validate(self) -> None:
        """Measure the anchor on the validation split, which is the same at every site."""
        state = self._rounds.state
        self.progress.validation_loss = await self._trainer.evaluate(state.tensors[ANCHOR])
        self.progress.validated_round = state.round

    def _assert_agreement(self, state: OuterState) -> None:
        for node in self._roster.participants():
            pulse = self._roster.pulse_of(node)
            if pulse and pulse.round == state.round and pulse.digest != state.digest:
                raise PierError(
                    f"round {state.round}: {node} holds other bits than this site: {pulse.digest.hex()[:12]} there, "
                    f"{state.digest.hex()[:12]} here",
                    "One of the two must start again from an empty data directory; please report this.",
                )

    # --- catching up ---------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Fetch the newest state from the others; what no round took is kept for the next one."""
        self.progress.phase = Phase.PHASE_CATCHING_UP
        last, backoff, arrived = self._rounds.state, Backoff(), Partial()
        while True:
            peers = self._roster.ahead(last.round)
            try:
                fetched = await self._fetch(peers, arrived)
                break
            except PeerLost as lost:
                log.warning("cannot catch up yet: %s", lost.reason)
                await self._roster.changed.wait(backoff.seconds())
                if not self._roster.ahead(last.round):
                    return
        self._rounds.adopt(fetched.state)
        self._carry(last, fetched.state)
        self._take_moments(fetched.adam_m, fetched.adam_v, fetched.adam_step)
        self._late = True
        log.info("caught up with round %d", fetched.state.round)

    async def _fetch(self, peers: list[str], arrived: Partial) -> Fetched:
        pulse = self._roster.pulse_of(peers[0]) if peers else None
        if pulse is None:
            raise PeerLost("", "nobody who is ahead answers")
        await self._faults.reach(pulse.round, "fetching")
        return await fetch_state(
            self._carrier,
            peers,
            length=self._layout.length,
            timeout=SILENCE,
            round=pulse.round,
            digest=pulse.digest,
            moments=self._adam_step == 0,
            partial=arrived,
        )

    def _carry(self, last: OuterState, state: OuterState) -> None:
        """Start from φ_new − Δ if our Δ is not in φ_new: the next round takes it together with what comes."""
        node = self._carrier.node
        if state.ledger.get(node, 0) > last.ledger.get(node, 0):
            self._pending.tokens = 0
        if self._pending.tokens:
            self._start_from_pending()
        else:
            self._start = None

    def _start_from_pending(self) -> None:
        self._start = SharedVector(self._layout.length)
        np.subtract(self._rounds.state.anchor, self._pending.vector.array, out=self._start.array)

    def _take_moments(self, adam_m: SharedVector | None, adam_v: SharedVector | None, adam_step: int) -> None:
        if adam_m is None or adam_v is None:
            return
        self._trainer.adam_m.array[:] = adam_m.array
        self._trainer.adam_v.array[:] = adam_v.array
        self._adam_step, self._load_adam = adam_step, True
