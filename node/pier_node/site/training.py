"""Training a replica of the whole model: train, bring an update to a round, take the result, catch up when left behind.

How a round is decided, by all sites or between two, is the agreement's business (agreement.py).

Without overlap, workers wait for a round's result. If the model is LARGE, they train on while the result is being
written to disk; the site still tells others nothing that is not on its disk. With overlap, they continue from φ − Δ
while the update Δ is in flight. The result is applied as soon as it is there, or at the end of the next inner steps if
half of them are done by then: delay costs loss (docs/results.md, "Convergence"). What those steps learned is kept on
top of it: the site continues from φ_new − Δ_new, and Δ_new is its update for the next round. So every step counts
once, as in the delayed update of Streaming DiLoCo (Douillard et al., arXiv 2501.18512, section 2.3), except that no
local progress is discarded.

A result is first decided (`Rounds.decided`), then on the disk (`Rounds.state`; `_keeping` waits for that), and then
part of a checkpoint (`_saving`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from pier_node.base.shared import SharedVector
from pier_node.base.tasks import cancel_and_wait, run_to_end
from pier_node.base.tracing import span
from pier_node.config.run import RunConfig
from pier_node.outer.advance import advance
from pier_node.outer.layout import Layout
from pier_node.outer.mean import Update, worth_sending
from pier_node.outer.schedule import Kind, RoundPlan, entry, round_plan, total_rounds
from pier_node.outer.state import ADAM_M, ADAM_V, ANCHOR, OuterState
from pier_node.rounds.attempt import Advance
from pier_node.rounds.progress import Progress
from pier_node.rounds.state_store import Checkpoint
from pier_node.site.agreement import Agreement
from pier_node.site.error_feedback import UnsentUpdate
from pier_node.site.inner_steps import InnerSteps, Trained, Trainer, steps_worth_doing
from pier_node.site.loop import Work
from pier_proto.v1.peer_pb2 import Phase


@dataclass(frozen=True)
class Flight:
    """An update in flight to a round, while workers wait for the result or, with overlap, continue training.

    Attributes:
        before: the state that the update was made from.
        work: finishes when the round is decided here, whether or not this site was in it. None: the round
            took the update before this site was restarted.
    """

    plan: RoundPlan
    before: OuterState
    work: asyncio.Task[bool] | None


NOWHERE = SharedVector(0)
OnCommit = Callable[[Checkpoint, Awaitable[object]], Coroutine[Any, Any, None]]
log = logging.getLogger(__name__)
LARGE = 1 << 24
"""Parameters from which workers train on while a result is written. With fewer, writing takes little time; and shorter
rounds would keep a site that fetches states over a slow link from ever catching up."""
APART = (Kind.LOCAL, Kind.PAIR)
"""Kinds of round that a site may miss and bring its Δ to the next one."""


class Training(Work):
    """A replica's part in a run, from the state that its agreement holds to the end of the run.

    Args:
        on_commit: called after each decided round with the content of a checkpoint. The coroutine that it returns runs
            during the next inner steps: it waits for the second argument (the state is on disk), then saves the
            checkpoint. Until then nothing writes to the checkpoint's vectors.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        agreement: Agreement,
        trainer: Trainer,
        progress: Progress,
        on_commit: OnCommit,
    ) -> None:
        self._config, self._layout, self._agreement = config, layout, agreement
        self._rounds, self._trainer, self.progress, self._on_commit = agreement.rounds, trainer, progress, on_commit
        self._inner = InnerSteps(config, trainer, progress)
        outer = config.outer
        self._unsent = UnsentUpdate(
            *(layout.length, outer.fragments, outer.codec != "none", outer.error_decay),
            rounded=outer.residual == "bf16",
        )
        self._start = NOWHERE
        self._flight: Flight | None = None
        self._keeping: asyncio.Task[bool] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._late = False  # whether the last round went on without this site

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: restore moments, counters, the unsent update and a flight that has arrived.

        The state that `rounds` holds may be later, if it was committed before its checkpoint could be taken.
        """
        self._inner.take_moments(checkpoint.adam_m, checkpoint.adam_v, checkpoint.adam_step)
        self._take_moments_of(state := self._rounds.state)
        self.progress.inner_step, self.progress.tokens = checkpoint.inner_step, checkpoint.tokens
        before = checkpoint.state.round
        # A synchronous round has taken all of the residual, not a fragment's.
        taken = state.round > before and round_plan(self._config, before + 1).kind is Kind.SYNC
        self._unsent.restore(checkpoint.pending, checkpoint.pending_tokens, None if taken else checkpoint.residual)
        if self._was_overlapped(checkpoint.state):
            self._start = self._beginning(checkpoint.state)
            self._flight = Flight(round_plan(self._config, state.round), checkpoint.state, None)
        else:
            self._drop_taken(checkpoint.state)

    def _was_overlapped(self, before: OuterState) -> bool:
        """Whether the round after `before` took this site's update while its next inner steps, now lost, were done.

        Those steps are repeated from where they began, so that the site ends with the bits of one that never stopped.
        """
        state = self._rounds.state
        if not self._config.outer.overlap or state.round != before.round + 1:
            return False
        plan = round_plan(self._config, state.round)
        if self.progress.inner_step < plan.first_step + plan.steps:  # the round took more than the checkpoint has
            return False
        key = entry(self._agreement.node, plan.fragment)
        return plan.kind in APART and state.ledger.get(key, 0) > before.ledger.get(key, 0)

    @property
    def resting(self) -> bool:
        """Whether `snapshot` is valid: the workers are not publishing, and no update that is in its state is in Δ."""
        return self._inner.resting and self._flight is None

    def snapshot(self) -> Checkpoint:
        """A checkpoint of this site at rest."""
        state, pending, trainer, adam_step = self._rounds.decided, self._unsent, self._trainer, self._inner.adam_step
        own = ADAM_M not in state.tensors and adam_step > 0
        return Checkpoint(
            state=state,
            adam_m=trainer.adam_m if own else None,
            adam_v=trainer.adam_v if own else None,
            adam_step=adam_step if own else 0,
            inner_step=self.progress.inner_step,
            tokens=self.progress.tokens,
            pending=pending.delta if pending else None,
            pending_tokens=tuple(pending.tokens) if pending else (),
            residual=pending.residual,
        )

    # --- what the site's loop calls ------------------------------------------------------------

    def due(self) -> bool:
        """Whether there is another round."""
        return self._next_round() <= total_rounds(self._config)

    def behind(self) -> bool:
        """Whether other sites are ahead, and their state can be taken now."""
        rounds = self._rounds
        return self._flight is None and rounds.decided is rounds.state and bool(rounds.sources())

    async def catch_up(self) -> None:
        """Continue from the newest state of the other sites; the unsent update is kept."""
        before = self._rounds.state
        try:
            self._late |= await self._fetch()
            await self._saved()
        finally:  # a state that is here when the site is stopped may have Δ in it
            await run_to_end(asyncio.to_thread(self._drop_taken, before))

    async def step(self) -> None:
        """Do the inner steps of a round and bring the update to it. Raises PierError when training cannot continue."""
        self._late |= self._flight is None and self._rounds.coming() > self._rounds.state.round + 1
        await self._round(round_plan(self._config, self._next_round()))

    async def rest(self) -> None:
        """Wait for the update in flight, if any, and until its result is saved."""
        if await self._land():
            await self._settled(self.snapshot())
        await self._saved()

    async def finish(self) -> None:
        """End the run: take the last result, and what the sites conclude from it together, if anything."""
        await self.rest()
        if self._rounds.state.round != total_rounds(self._config):  # beyond: the models were merged before a restart
            return
        self.progress.phase = Phase.PHASE_WAITING
        if await self._agreement.conclude(self.validate):
            await self._save(self.snapshot())

    async def close(self) -> None:
        """End the flight, if there is one, and finish saving."""
        if self._keeping is not None:
            await run_to_end(asyncio.wait([self._keeping]))
        if (saving := self._saving) is not None:
            await run_to_end(asyncio.wait([saving]))
            if failure := saving.exception():
                log.warning("the last checkpoint is not saved: %s", failure)  # what ended the site is raised
        await self._drop_flight()

    def _next_round(self) -> int:
        if self._flight is not None:
            return self._flight.plan.round + 1
        return max(self._rounds.coming(), self._rounds.decided.round + 1)

    # --- one round -----------------------------------------------------------------------------

    async def _round(self, plan: RoundPlan) -> None:
        with span("round", round=plan.round):
            if self._flight is None:
                self._start = await asyncio.to_thread(self._beginning, self._rounds.decided)
            with span("inner steps"):
                trained = await self._train(plan)
            with span("boundary"):
                await self._bring(plan, trained)

    async def _bring(self, plan: RoundPlan, trained: Trained) -> None:
        """Take the result of the round before, if it is in flight, and bring what was learnt to this one."""
        tokens = trained.tokens
        learnt = tokens if plan.kind in APART else 0
        try:
            landed = await self._land()
        except BaseException:  # the site ends: what it has learned meanwhile goes into its last checkpoint
            await run_to_end(self._abandon_flight(learnt))
            raise
        await run_to_end(self._learn(learnt))
        self._start = NOWHERE
        if trained.left:  # the remaining steps begin from the result
            if landed:
                await self._settled(self.snapshot())
            return
        if (number := self._rounds.coming()) <= total_rounds(self._config):
            await self._launch(round_plan(self._config, number), tokens)
        checkpoint = self.snapshot()  # without what has just been forgotten, if training diverged
        if landed:
            await self._settled(checkpoint)
        small = self._layout.length < LARGE
        if not (self._config.outer.overlap and plan.kind in APART) and await self._land(kept=small):
            await self._settled(self.snapshot())

    async def _abandon_flight(self, tokens: int) -> None:
        await self._drop_flight()
        await self._learn(tokens)

    def _beginning(self, state: OuterState) -> SharedVector:
        """φ − Δ, the weights from which training continues."""
        return self._unsent.start(state.anchor) or state.tensors[ANCHOR]

    async def _train(self, plan: RoundPlan) -> Trained:
        """Do the inner steps of the round, or some of them if the update in flight arrives."""
        steps = steps_worth_doing(plan, self._config.outer, self.progress, self._agreement.others(), self._late)
        self.progress.training_for, self.progress.steps = plan.round, steps
        if steps == 0:
            return Trained()
        self.progress.phase = Phase.PHASE_TRAINING
        arrives = self._flight.work if self._flight and self._agreement.others() else None
        return await self._inner.train(plan, steps, self._start, arrives)

    async def _learn(self, tokens: int) -> None:
        """Add the inner steps just done to the unsent update, once that is saved as it was before them."""
        try:
            await self._saved()
        finally:
            start, weights = self._start.array, self._trainer.outbox.array
            if tokens and not await asyncio.to_thread(self._unsent.learn, start, weights, tokens):
                log.warning(
                    "%d tokens have changed no weight: is the learning rate 0, or does the optimizer step other "
                    "parameters than those that `pier.join` was given?",
                    tokens,
                )

    async def _launch(self, plan: RoundPlan, tokens: int) -> None:
        """Bring this site's update to a round."""
        update = await asyncio.to_thread(self._update, plan, tokens)
        state = self._rounds.state
        self._flight = Flight(plan, state, asyncio.create_task(self._exchange(plan, update)))
        if self._config.outer.overlap:
            self._start = await asyncio.to_thread(self._beginning, state)

    def _update(self, plan: RoundPlan, tokens: int) -> Update:
        outbox, norm, pending = self._trainer.outbox.array, self._rounds.state.norm, self._unsent
        part = plan.span(self._layout.length)
        if plan.kind is Kind.SOLO:
            return worth_sending(plan, Update(outbox, tokens), norm)
        if plan.kind in APART:
            tokens = pending.tokens[plan.fragment]
        sent = worth_sending(plan, pending.offer(part, tokens, outbox if plan.kind is Kind.SYNC else None), norm)
        if sent.tokens < tokens:
            self._forget(plan)
        if plan.kind is Kind.PAIR:  # a pair exchanges weights: φ − Δ, whatever has just happened to Δ
            theta = pending.offer(part, sent.tokens, self._beginning(self._rounds.state).array)
            return Update(theta.sent(), theta.tokens, theta.error)
        return sent

    def _forget(self, plan: RoundPlan) -> None:
        """Training diverged here: continue from the anchor, without the moments that would lead there again."""
        log.warning(
            "training diverged in the inner steps %d to %d: this site continues from the anchor, and its optimizer "
            "without its state",
            *(plan.first_step, plan.first_step + plan.steps - 1),
        )
        self._unsent.forget()
        if plan.kind in APART:
            self._inner.forget_moments()

    async def _exchange(self, plan: RoundPlan, update: Update) -> bool:
        """Run until the round is decided and known here. Returns whether this site took part to the end."""
        began = asyncio.get_running_loop().time()
        try:
            return await self._agreement.decide(plan, update, self._advance(plan), self._fetch)
        finally:
            if self._flight is not None and self._flight.plan is plan:  # `_land` has not gone on without its end
                self.progress.round_time = asyncio.get_running_loop().time() - began

    def _advance(self, plan: RoundPlan) -> Advance:
        # True if the weights stay in the outbox until the round is over and nothing of them is left for later.
        whole = not self._config.outer.overlap and self._unsent.residual is None

        def step(state: OuterState, mean: SharedVector, tokens: Mapping[str, int]) -> OuterState:
            alone = whole and len(tokens) == 1 and tokens.get(self._agreement.node, 0) > 0
            weights = self._trainer.outbox.array if alone else None
            return advance(state, mean, tokens, plan, self._layout, self._config.inner, weights)

        return step

    async def _land(self, kept: bool = True) -> bool:
        """Apply the result of the update in flight, if any. Returns whether there is a new state that is not saved.

        Args:
            kept: wait until the new state is on the disk, too; otherwise `_keeping` may still be at it.
        """
        if self._flight is None:
            return False
        flight, began = self._flight, asyncio.get_running_loop().time()
        self.progress.phase = Phase.PHASE_WAITING
        took_part = flight.work is None or await self._outcome(flight.work, flight.plan.round, kept)
        self.progress.times = self._rounds.times
        waited = asyncio.get_running_loop().time() - began
        self.progress.waited += waited
        if flight.work is not None and not flight.work.done():
            self.progress.round_time = waited
        await self._saved()
        await self._drop_flight()
        self._late = not took_part
        state = self._rounds.decided
        if took_part and flight.plan.kind is Kind.SYNC and state.round < total_rounds(self._config):
            await asyncio.to_thread(self._take_moments_of, state)
        return took_part

    async def _outcome(self, work: asyncio.Task[bool], round: int, kept: bool) -> bool:
        """Whether this site took part in a round to its end."""
        if not kept:
            try:
                await self._rounds.until_decided(round, work)
            except asyncio.CancelledError:
                work.cancel()
                await work
                raise
            if not work.done():
                self._keeping = work
                return True
        return await work

    async def _drop_flight(self) -> None:
        """End the flight, whether finished or cancelled. The state's ledger tells whether Δ is in the anchor."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        if flight.work is not None and flight.work is not self._keeping:
            await cancel_and_wait(flight.work)
        await run_to_end(asyncio.to_thread(self._drop_taken, flight.before))

    async def _settled(self, checkpoint: Checkpoint) -> None:
        """Finish a committed round: validate it when due, and begin to save it."""
        state = checkpoint.state
        self._agreement.compare(state)
        every, last = self._config.inner.eval_every, state.round == total_rounds(self._config)
        if last or (every and state.round % every == 0):
            await self.validate(state)
        await self._saved()
        keeping, self._keeping = self._keeping, None
        self._saving = asyncio.create_task(self._save(checkpoint, keeping))

    async def _save(self, checkpoint: Checkpoint, keeping: asyncio.Task[bool] | None = None) -> None:
        with span("checkpoint"):
            await self._on_commit(checkpoint, keeping or asyncio.sleep(0))
        await self._agreement.faults.reach(checkpoint.state.round, "saved")

    async def _saved(self) -> None:
        """Wait until the last round's checkpoint is saved. Raises PierError: it cannot be."""
        if (saving := self._saving) is not None:
            await asyncio.wait([saving])  # it is not cancelled with us
            self._saving = None
            saving.result()

    async def validate(self, state: OuterState) -> None:
        """Compute the loss of the state's anchor on the validation split, which is the same at every site."""
        with span("validation"):
            loss = await self._trainer.evaluate(state.tensors[ANCHOR])
        if math.isnan(loss):  # a program of the site's owner validates for itself
            return
        self.progress.validation_loss, self.progress.validated_round = loss, state.round

    # --- left behind ---------------------------------------------------------------------------

    async def _fetch(self) -> bool:
        """Continue from the newest state of the other sites, if any is ahead; the unsent update is kept."""
        phase, self.progress.phase = self.progress.phase, Phase.PHASE_CATCHING_UP
        state = await self._agreement.fetch()
        if self.progress.phase == Phase.PHASE_CATCHING_UP:
            self.progress.phase = phase
        if state is None:
            return False
        self.progress.training_for = self._rounds.coming()  # inner steps being done meanwhile count for that round
        self._agreement.tell()
        await self._saved()
        await asyncio.to_thread(self._take_moments_of, state)
        log.info("caught up with round %d", state.round)
        return True

    def _take_moments_of(self, state: OuterState) -> None:
        """Continue with the moments of a state in the synchronous part of the run; others have none."""
        if ADAM_M in state.tensors:
            self._inner.take_moments(state.tensors[ADAM_M], state.tensors[ADAM_V], state.adam_step)

    def _drop_taken(self, before: OuterState) -> None:
        """Drop from the unsent update what is in φ_new. The rest stays for a later round, together with new steps."""
        state = self._rounds.decided
        for fragment in range(self._config.outer.fragments):
            key = entry(self._agreement.node, fragment)
            if state.ledger.get(key, 0) > before.ledger.get(key, 0):
                self._unsent.taken(fragment)
