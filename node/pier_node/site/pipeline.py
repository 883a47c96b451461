"""A site of a pipeline: the counterpart of replica.py.

A site computes in one thread of its own, one task after the other. Python joins the threads of its own pools when the
process ends, so a thread that hangs in a device driver would keep the process alive. ComputeThread waits only for a
limited time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, suppress
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

import torch

from pier_node.base.errors import PierError
from pier_node.outer.advance import get_ready
from pier_node.outer.state import OuterState
from pier_node.pipeline import vote_state
from pier_node.pipeline.activation_codec import Formats
from pier_node.pipeline.beginnings import Beginnings
from pier_node.pipeline.context import Rows, Tools
from pier_node.pipeline.paths_file import PATHS_FILE, LatestPaths
from pier_node.pipeline.stage_state import StageState
from pier_node.rounds.catch_up import Wanted
from pier_node.rounds.member import Rounds
from pier_node.rounds.proofs import alone
from pier_node.rounds.state_store import CHECKPOINTS, Checkpoint, StateStore
from pier_node.site.membership import Joined, rounds_of_all
from pier_node.site.pipeline_training import PipelineTraining, lines
from pier_node.site.report import note
from pier_node.site.resume import first_state, no_weights
from pier_node.site.round_log import RoundLog
from pier_node.trainer import devices
from pier_node.trainer.data.corpus import Windows, open_corpus

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = 5.0
"""Seconds to wait for the running computation when the site ends."""


class ComputeThread(Executor):
    """An executor with one daemon thread."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a task after those submitted before."""
        future: Future[T] = Future()
        self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End after the queued tasks, or after the running one if `cancel_futures`; `wait` at most PATIENCE seconds."""
        with suppress(Empty):
            while cancel_futures:
                if task := self._tasks.get_nowait():
                    task[0].cancel()
        self._tasks.put(None)
        if wait:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        while task := self._tasks.get():
            _do(*task)
            del task  # free what it holds now, not when the next task arrives


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)


log = logging.getLogger(__name__)
VOTE_STATES = "tallies"
"""Folder of the checkpoints of the run's state. The joined model is in the same folder as in other runs."""


class PipelineSite:
    """A site of a pipeline; `rounds` decide about its iterations."""

    def __init__(self, joined: Joined, state: OuterState, vote_states: StateStore) -> None:
        self._joined, self._vote_states = joined, vote_states
        config, settings, reporter = joined.config, joined.settings, joined.reporter
        length = vote_state.length(config.pipeline.stages)
        self.rounds: Rounds = rounds_of_all(joined, self._keep, length, state)
        device = devices.pick()
        self._formats = Formats.of(config, devices.uses_bf16(device, config.inner.precision))
        self._thread = ComputeThread()
        tools = Tools(
            carrier=joined.carrier,
            roster=joined.roster,
            thread=self._thread,
            rows=self._rows,
            memory=config.pipeline.memory,
            formats=self._formats,
            faults=settings.faults,
            open_data=lambda: self._windows,
            founder=joined.record.founded_by,
        )
        self._log = RoundLog(config.inner.total_steps, joined.progress, joined.carrier)
        self._pace = tools.pace
        self._stage_state = StageState(settings.folder, config)
        paths = LatestPaths(settings.folder / PATHS_FILE)
        self.training = PipelineTraining(
            config,
            self.rounds,
            self._stage_state,
            tools,
            joined.progress,
            device,
            on_commit=self._committed,
            on_end=self._ended,
            on_plan=paths.planned,
            orders=joined.orders,
        )
        reporter.rounds, reporter.place = self.rounds, self.training.place
        reporter.gives = self.training.gives
        reporter.paths, reporter.wanted = (lambda: paths.message), (lambda: joined.orders.stage)

    async def close(self) -> None:
        """Stop the compute thread, and keep the stage. At most the running task is finished, if it ends soon."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        try:
            await asyncio.to_thread(self._stage_state.rest)
        except PierError as error:  # the records are there
            log.warning("the stage is not kept in full: %s", error)

    async def _keep(self, state: OuterState) -> None:
        await asyncio.to_thread(self._vote_states.save, at_rest(state, self.training.tokens_after(state)))

    async def _committed(self, state: OuterState) -> None:
        trips = self._joined.roster.round_trips()
        joined = self._joined
        tell = joined.committed(state, lines(self._pace.transfers(), trips, self._formats.mean_size))
        note(joined.settings.folder, joined.reporter.event(state, joined.roster))
        tell()
        self._log.committed(state)

    async def _ended(self, model: Checkpoint) -> None:
        checkpoints = StateStore(self._joined.settings.folder / CHECKPOINTS, self._joined.config.hash())
        await asyncio.to_thread(checkpoints.save, model)

    def _rows(self, step: int, place: int) -> Rows:
        size = self._joined.config.inner.batch_size
        inputs, targets = self._windows.rows(step, place * size, size)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    @cached_property
    def _windows(self) -> Windows:
        """The site's part of the data; only sites of stage 0 read it."""
        config, data = self._joined.config, self._joined.data
        cache = self._joined.settings.folder / "cache"
        corpus = open_corpus(config.data, data.slot, data.slots, data.path, cache)
        model, node = config.model, self._joined.carrier.node
        return Windows(corpus, model.context, config.run.seed, node, model.vocab_size)


async def prepare(joined: Joined, stack: AsyncExitStack) -> PipelineSite:
    """Build the site with the state from disk, or else from the other sites. From here on it is a member.

    Raises PierError.
    """
    config, progress, proofs = joined.config, joined.progress, joined.proofs
    devices.share_cores(1)
    vote_states = StateStore(joined.settings.folder / VOTE_STATES, config.hash())
    await joined.roster.settled()
    await asyncio.to_thread(get_ready, config)
    found = await asyncio.to_thread(vote_states.newest)
    if found:
        state, progress.tokens = found.state, found.tokens
    elif joined.record.founder:
        await _keep_given_weights(joined)
        state = vote_state.beginning(config.pipeline.stages, joined.carrier.node)
        await asyncio.to_thread(proofs.add, [alone(state, b"", joined.statements)])
    else:
        joined.joins_others()
        length = vote_state.length(config.pipeline.stages)
        fetched = await first_state(joined.carrier, joined.roster, lambda: Wanted(length, trust=joined.first_trust()))
        await asyncio.to_thread(proofs.add, fetched.proof)
        state = fetched.state
    joined.roster.keep(state.members)
    await asyncio.to_thread(vote_states.save, at_rest(state, progress.tokens))
    site = PipelineSite(joined, state, vote_states)
    stack.push_async_callback(site.close)
    joined.background.start(stack, site.rounds.run())
    joined.leave_politely(stack, site.rounds)
    return site


async def _keep_given_weights(joined: Joined) -> None:
    """Keep the weights that the run begins with, if they are those of a model. Raises PierError."""
    config, folder = joined.config, joined.settings.weights
    beginnings = Beginnings(joined.settings.folder, config)
    if config.begins_pretrained and folder:
        await asyncio.to_thread(beginnings.read, folder)
        joined.say(f"The run starts from the weights in {folder}. Other sites get their stages from here.")
    elif config.begins_pretrained and not beginnings.gives():
        raise no_weights(config)


def at_rest(state: OuterState, tokens: int) -> Checkpoint:
    """The run's state as a checkpoint of a site that has trained on that many tokens."""
    return Checkpoint(state, inner_step=vote_state.vote_state_of(state).steps, tokens=tokens)
