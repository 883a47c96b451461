"""A site that trains a replica of the whole model: its states on disk, its workers, its part in rounds or pairs."""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from pier_node.base.tasks import cancel_and_wait
from pier_node.base.tracing import start_traces
from pier_node.base.units import count
from pier_node.engine.messages import Logged, newest
from pier_node.engine.moments import Moments
from pier_node.engine.program import Program
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.outer.advance import get_ready
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import total_rounds
from pier_node.outer.state import ANCHOR, OuterState
from pier_node.rounds.means import Means
from pier_node.rounds.progress import Progress
from pier_node.rounds.state_store import Checkpoint
from pier_node.site.agreement import Agreement, InPairs, OfAll, Peers
from pier_node.site.membership import Joined, pairs_of_two, rounds_of_all
from pier_node.site.report import note
from pier_node.site.resume import Stores, resume
from pier_node.site.round_log import RoundLog, tell_start
from pier_node.site.running import Status
from pier_node.site.trackers import SiteFile, Trackers, Who
from pier_node.site.training import Training
from pier_node.trainer.command import Workers, own_trainer
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import Phase

LOOK = 0.2
"""Seconds between two looks at whether others are ahead."""
log = logging.getLogger(__name__)


class Replica:
    """A replica, from `state` on: its newest checkpoint's, or a later one that was kept without a checkpoint.

    Args:
        trainer: Pier's own, or the program of the site's owner.

    Attributes:
        training: its part in the run, for the site's loop.
        rounds: its rounds of all sites, or its pairs.
    """

    def __init__(
        self,
        joined: Joined,
        trainer: Program,
        stores: Stores,
        trackers: Trackers,
        layout: Layout,
        state: OuterState,
    ) -> None:
        self._joined, self._trainer, self._trackers = joined, trainer, trackers
        self._states, self._checkpoints = stores
        config = joined.config
        others = dict if config.outer.algorithm == "noloco" else joined.roster.participants
        self._log = RoundLog(config.inner.total_steps, joined.progress, joined.carrier, others)
        means = Means.of_site(joined.settings.folder, config, layout)
        self._of_all = rounds_of_all(joined, self._keep, layout.length, state, means)
        peers = Peers(joined.carrier, joined.roster, layout.length, joined.settings.faults, means)
        agreement: Agreement
        if config.outer.algorithm == "noloco":
            merging = self._of_all if config.outer.final_merge else None
            agreement = InPairs(pairs_of_two(joined, state), peers, joined.progress, self._keep, merging)
        else:
            agreement = OfAll(self._of_all, peers)
        self.rounds = joined.reporter.rounds = agreement.rounds
        StateServer(joined.carrier, self._offer, self._of_all.prove, means.chunks)
        self.training = Training(config, layout, agreement, trainer, joined.progress, self.committed)
        trainer.publishes_moments = self._is_due(state.round + 1)

    async def begin(self, stack: AsyncExitStack, checkpoint: Checkpoint) -> None:
        """Become a member, and continue from the checkpoint. When the stack is closed, save the rest and leave."""
        if isinstance(self.rounds, PairRounds):
            stack.push_async_callback(self.rounds.stop)
            self._joined.leave_politely(stack, None)
        else:
            self._joined.background.start(stack, self.rounds.run())
            self._joined.leave_politely(stack, self.rounds)
        await asyncio.to_thread(self.training.restore, checkpoint)
        self._trainer.recover_moments = self._saved_moments
        stack.push_async_callback(asyncio.to_thread, self._save_rest)

    async def finish(self) -> None:
        """Save what is left, and hand the model to the owner's program."""
        await asyncio.to_thread(self._save_rest)
        if self._joined.config.program:
            await self._trainer.finish(self.rounds.state.tensors[ANCHOR])

    def conclusion(self) -> str:
        """What was learned, and what can be done with it now."""
        joined, progress = self._joined, self._joined.progress
        loss = "" if math.isnan(progress.validation_loss) else f"validation loss {progress.validation_loss:.4f}; "
        learned = f"{loss}{count(progress.tokens)} tokens trained on here."
        if joined.config.program:  # its program has the model
            return learned
        data = f"--data {shlex.quote(str(joined.settings.folder))}"
        words = ("evaluate", "generate 'Once upon a time'", "export MODEL")
        commands = *(f"{it} {data}" for it in words), "serve --model MODEL"
        return "\n".join((learned, "Next:", "", *(f"  pier-node {it}" for it in commands), ""))

    async def train_experts(self) -> None:
        """Train experts from the run's last state, if they are ordered."""
        joined = self._joined
        if joined.coordination is None or joined.orders.experts is None:
            return
        from pier_node.site.experts import train_experts  # with torch, which a daemon does without otherwise

        await self._trainer.stop()
        seed = self.training.snapshot().state
        folder = await train_experts(
            joined.config, joined.settings, seed, joined.coordination, joined.progress, joined.roster
        )
        joined.say(f"The experts are trained. This site's experts are in {folder}.")

    def _offer(self, number: int, shadow: bool) -> OuterState | None:
        """What peers may fetch. In a run of pairs each site has its own state; only the merged model is voted on."""
        return (self._of_all if shadow else self.rounds).offer(number, shadow)

    def committed(self, checkpoint: Checkpoint, kept: Awaitable[object]) -> Coroutine[Any, Any, None]:
        """Note how training stands after a round that is decided.

        Returns a coroutine that waits until the state is on disk, saves the checkpoint, records the event and announces
        it: nobody hears of a round that this site would not know after a crash. The coroutine raises PierError.
        """
        joined, state = self._joined, checkpoint.state
        event = joined.reporter.event(state, joined.roster)
        self._trackers.told(joined.progress, event)
        self._log.committed(state)
        self._trainer.publishes_moments = self._is_due(state.round + 1)
        return self._save(checkpoint, joined.committed(state), event, kept)

    def _is_due(self, round: int) -> bool:
        """Whether a checkpoint is made after this round."""
        return round % self._joined.settings.checkpoint_every == 0 or round == total_rounds(self._joined.config)

    async def _save(
        self, checkpoint: Checkpoint, tell: Callable[[], None], event: Status, kept: Awaitable[object]
    ) -> None:
        async with self._trainer.moments_unchanged():
            await kept
            if self._is_due(checkpoint.state.round) or checkpoint.pending is not None:  # nobody else has what is unsent
                await asyncio.to_thread(self._checkpoints.save, checkpoint)
            else:
                # It is on the disk already, except for rounds of a solo start in a run of pairs.
                await asyncio.to_thread(self._states.keep, checkpoint.state)
        self.saved(checkpoint.state)
        note(self._joined.settings.folder, event)
        tell()

    async def _keep(self, state: OuterState) -> None:
        """Store a committed state, before this site announces that it has it. Raises PierError."""
        await asyncio.to_thread(self._states.keep, state)
        self.saved(state)

    def saved(self, state: OuterState) -> None:
        """Take note that from now on this state would survive a power cut."""
        if isinstance(self.rounds, PairRounds):
            self.rounds.saved = max(self.rounds.saved, state.round)

    def _save_rest(self) -> None:
        """Save what stopping would lose: the unsent update, and a state that was just committed or fetched."""
        if not self.training.resting:
            return
        rest, newest = self.training.snapshot(), self._checkpoints.peek()
        done = self._joined.progress.phase == Phase.PHASE_DONE
        if not done or newest is None or newest[1]["round"] != rest.state.round:
            self._checkpoints.save(rest)

    def _saved_moments(self) -> Moments | None:
        """AdamW's moments in the newest checkpoint."""
        saved = self._checkpoints.newest()
        return saved.moments if saved else None


async def prepare(joined: Joined, program: Program | None, stack: AsyncExitStack) -> Replica:
    """Start the workers and load or fetch the state. From here on this site takes part. Raises PierError."""
    config, folder, node = joined.config, joined.settings.folder, joined.carrier.node
    layout, name = Layout.of_run(config), joined.reporter.site.name
    told, who = SiteFile.of(folder).log, Who(config.run.name, name, f"{config.hash().hex()[:16]}-{node}")
    trackers = Trackers(told, who)
    stack.push_async_callback(asyncio.to_thread, trackers.close)
    stack.push_async_callback(asyncio.to_thread, start_traces(told.otlp, who.attributes))
    if program:
        trainer, slots = program, config.run.sites
        view = partial(joined.reporter.view, joined.roster)
        program.place(config, joined.record.slot % slots, slots, folder / "program", view)
    else:
        settings = joined.settings
        workers = Workers(settings.workers, settings.parallel, settings.early, told.samples)
        trainer = own_trainer(config, node, joined.data, folder, workers)
        stack.push_async_callback(trainer.stop)
    trainer.on_log = partial(_log, joined.progress, trackers)
    joined.progress.device = trainer.device
    starting = asyncio.create_task(trainer.start())
    stack.callback(starting.cancel)
    if program:
        await starting  # a founder begins with its weights
    await asyncio.to_thread(get_ready, config)
    stores = Stores.of(folder, config)
    resuming = asyncio.create_task(resume(joined, layout, stores, program))
    try:
        await asyncio.wait([starting, resuming], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting  # raises why it cannot train: for a state, a newcomer may have to wait for hours
        checkpoint, state, how = await resuming
    finally:
        await cancel_and_wait(resuming)
    replica = Replica(joined, trainer, stores, trackers, layout, state)
    await replica.begin(stack, checkpoint)
    joined.say(f"{how} at round {state.round} as {name} ({node}).")
    catching_up = asyncio.create_task(_catch_up_until(starting, replica.training))
    stack.push_async_callback(cancel_and_wait, catching_up)
    await asyncio.wait([starting, catching_up], return_when=asyncio.FIRST_EXCEPTION)
    if starting.done():
        await starting
    await catching_up
    telling = tell_start(config, trainer, joined.progress, joined.roster, joined.carrier, joined.measured)
    stack.callback(asyncio.create_task(telling).cancel)
    if replica.rounds.state.round == 0 and config.inner.eval_every:
        await replica.training.validate(state)
        note(folder, joined.reporter.event(state, joined.roster))
    return replica


async def _catch_up_until(started: asyncio.Task[None], training: Training) -> None:
    """Fetch what the other sites do while the trainer starts: this site takes no part in their rounds yet."""
    while not started.done():
        if training.behind():
            await training.catch_up()
        await asyncio.wait([started], timeout=LOOK)


def _log(progress: Progress, trackers: Trackers, logged: Logged) -> None:
    """Take note of metrics of the program's own."""
    progress.metrics = newest(progress.metrics, logged.metrics)
    trackers.logged(logged.metrics, logged.step)
