"""Assembles a site of a pipeline, as site/daemon.py does for a replica of the whole model.

A site computes in one thread of its own, one task after the other. Python joins the threads of its own pools when the
process ends, so a thread that hangs in a device driver would keep the process alive. ComputeThread waits only for a
limited time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

import torch

from pier_node.config.run import RunConfig
from pier_node.outer.state import OuterState
from pier_node.pipeline import vote_state
from pier_node.pipeline.context import Rows, Tools
from pier_node.pipeline.paths_file import PATHS_FILE, LatestPaths
from pier_node.pipeline.stage_state import StageState
from pier_node.rounds.catch_up import Wanted
from pier_node.rounds.certificate import alone
from pier_node.rounds.folder import SiteRecord
from pier_node.rounds.member import Rounds
from pier_node.rounds.proofs import Proofs
from pier_node.rounds.roster import Roster
from pier_node.rounds.state_store import CHECKPOINTS, Checkpoint, StateStore
from pier_node.rounds.statements import Statements
from pier_node.site.bootstrap import first_state, first_trust
from pier_node.site.member import Footing, rounds_of_all
from pier_node.site.orders import Orders
from pier_node.site.pipeline_training import PipelineTraining, lines
from pier_node.site.report import Reporter
from pier_node.site.settings import Settings
from pier_node.trainer import devices
from pier_node.trainer.data.corpus import SiteData, Windows, open_corpus
from pier_node.trainer.data.tokens import check_vocab
from pier_node.wire.carrier import Carrier
from pier_proto.v1.peer_pb2 import DoubleVote, Phase

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


TALLIES = "tallies"
"""Folder of the checkpoints of the run's state. The joined model is in the same folder as in other runs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ground:
    """What a site has before it has a stage.

    Attributes:
        committed: called for each round that was committed here, with the bandwidth to other sites in bytes per second.
    """

    config: RunConfig
    settings: Settings
    carrier: Carrier
    statements: Statements
    roster: Roster
    reporter: Reporter
    record: SiteRecord
    orders: Orders
    committed: Callable[[OuterState, Mapping[str, float]], None]
    proofs: Proofs
    convict: Callable[[DoubleVote], None]


class PipelineSite:
    """A site of a pipeline; `rounds` decide about its iterations."""

    def __init__(self, ground: Ground, state: OuterState, tallies: StateStore) -> None:
        self._ground, self._tallies = ground, tallies
        config, progress = ground.config, ground.reporter.progress
        length = vote_state.length(config.pipeline.stages)
        settings = ground.settings
        of_run = ground.statements, settings.folder, ground.proofs, ground.convict
        here = Footing(config, ground.carrier, ground.roster, *of_run, settings.faults)
        self.rounds: Rounds = rounds_of_all(here, self._keep, length, state)
        shape = (config.inner.batch_size, config.model.context, config.model.dim)
        self._thread = ComputeThread()
        memory = config.pipeline.memory
        own = self._thread, self._rows, memory, shape, ground.settings.faults, lambda: self._windows
        tools = Tools(ground.carrier, ground.roster, *own)
        stage_state, device = StageState(ground.settings.folder, config), devices.pick(0)
        self._tensor_bytes = math.prod(shape) * (2 if devices.uses_bf16(device, config.inner.precision) else 4)
        self._pace = tools.pace
        paths = LatestPaths(ground.settings.folder / PATHS_FILE)
        ends = self._committed, self._ended, paths.planned
        self.training = PipelineTraining(
            config, self.rounds, stage_state, tools, progress, device, *ends, ground.orders
        )
        ground.reporter.rounds, ground.reporter.place = self.rounds, self.training.place
        ground.reporter.paths, ground.reporter.wanted = (lambda: paths.message), (lambda: ground.orders.stage)

    async def close(self) -> None:
        """Stop the compute thread. At most the running task is finished, if it ends soon."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _keep(self, state: OuterState) -> None:
        await asyncio.to_thread(self._tallies.save, at_rest(state, self._ground.reporter.progress.tokens))

    async def _committed(self, state: OuterState) -> None:
        ground = self._ground
        ground.reporter.note(ground.settings.folder, state, ground.roster)
        ground.roster.keep(state.members)
        ground.committed(state, lines(self._pace.transfers(), ground.roster.round_trips(), self._tensor_bytes))
        now = vote_state.standing(state)
        log.info("round %d: step %d, loss %.4f, %d sites", state.round, now.steps, now.loss, len(state.members))

    async def _ended(self, model: Checkpoint) -> None:
        checkpoints = StateStore(self._ground.settings.folder / CHECKPOINTS, self._ground.config.hash())
        await asyncio.to_thread(checkpoints.save, model)

    def _rows(self, step: int, place: int) -> Rows:
        size = self._ground.config.inner.batch_size
        inputs, targets = self._windows.rows(step, place * size, size)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    @cached_property
    def _windows(self) -> Windows:
        """The site's part of the data; only sites of stage 0 read it."""
        ground, config = self._ground, self._ground.config
        settings = ground.settings
        data = SiteData.of(config, ground.record.slot, settings.data, settings.shared_data)
        corpus = open_corpus(config.data, data.slot, data.slots, data.path, settings.folder / "cache")
        check_vocab(corpus.vocab_size, config.model.vocab_size)
        return Windows(corpus, config.model.context, config.run.seed, ground.carrier.node)


async def prepare(ground: Ground, stack: AsyncExitStack) -> PipelineSite:
    """Build the site with the state from disk, or else from the other sites. Raises PierError."""
    config, reporter = ground.config, ground.reporter
    devices.share_cores(1)

    tallies = StateStore(ground.settings.folder / TALLIES, config.hash())
    await ground.roster.settled()
    proofs = ground.proofs
    found = await asyncio.to_thread(tallies.newest)
    if found:
        state, reporter.progress.tokens = found.state, found.tokens
    elif ground.record.founder:
        state = vote_state.beginning(config.pipeline.stages, ground.carrier.node)
        await asyncio.to_thread(proofs.add, [alone(state, b"", ground.statements)])
    else:
        reporter.progress.phase = Phase.PHASE_CATCHING_UP
        length = vote_state.length(config.pipeline.stages)
        of_run = ground.settings.trust, ground.record.founded_by, ground.statements
        fetched = await first_state(ground.carrier, ground.roster, lambda: Wanted(length, trust=first_trust(*of_run)))
        await asyncio.to_thread(proofs.add, fetched.proof)
        state = fetched.state
    ground.roster.keep(state.members)
    await asyncio.to_thread(tallies.save, at_rest(state, reporter.progress.tokens))
    site = PipelineSite(ground, state, tallies)
    stack.push_async_callback(site.close)
    return site


def at_rest(state: OuterState, tokens: int) -> Checkpoint:
    """The run's state as a checkpoint of a site that has trained on that many tokens."""
    return Checkpoint(state, inner_step=vote_state.standing(state).steps, tokens=tokens)
