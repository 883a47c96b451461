"""Puts a pipeline's site together, as daemon.py does it for a replica of the whole model."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from pier.v1.peer_pb2 import DoubleVote, Link, Phase
from pier_node.archive import Archive
from pier_node.arrival import Arrival
from pier_node.checkpoint import Checkpoint, CheckpointStore
from pier_node.config import RunConfig
from pier_node.data.corpus import open_corpus
from pier_node.data.site_data import SiteData
from pier_node.data.tokens import check_vocab
from pier_node.data.windows import Windows
from pier_node.inner import devices
from pier_node.member import Footing, rounds_of_all
from pier_node.newcomer import first_trust
from pier_node.orders import Orders
from pier_node.outer.certificate import alone
from pier_node.outer.round import Rounds
from pier_node.outer.state import OuterState
from pier_node.outer.statements import Statements
from pier_node.pipeline import tally
from pier_node.pipeline.account import lines
from pier_node.pipeline.compute_thread import ComputeThread
from pier_node.pipeline.latest_paths import LatestPaths
from pier_node.pipeline.paths_file import PATHS_FILE
from pier_node.pipeline.tools import Rows, Tools
from pier_node.pipeline.training import PipelineTraining
from pier_node.pipeline.vault import Vault
from pier_node.proofs import Proofs
from pier_node.report import Reporter
from pier_node.roster import Roster
from pier_node.settings import Settings
from pier_node.site import SiteRecord
from pier_node.wire.carrier import Carrier, PeerLost
from pier_node.wire.transfer import SILENCE, fetch_state

TALLIES = "tallies"
"""Folder of the checkpoints of the run's state; that of the joined model is where others have theirs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ground:
    """What a site has before it has a stage.

    Attributes:
        committed: told of each round that was committed here, and of the bytes a second to other sites.
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

    def __init__(self, ground: Ground, state: OuterState, archive: Archive) -> None:
        self._ground, self._archive = ground, archive
        config, progress = ground.config, ground.reporter.progress
        length = tally.length(config.pipeline.stages)
        settings = ground.settings
        of_run = ground.statements, settings.folder, ground.proofs, ground.convict
        here = Footing(config, ground.carrier, ground.roster, *of_run, settings.faults)
        self.rounds: Rounds = rounds_of_all(here, self._keep, length, state)
        shape = (config.inner.batch_size, config.model.context, config.model.dim)
        self._thread = ComputeThread()
        memory = config.pipeline.memory
        own = self._thread, self._rows, memory, shape, ground.settings.faults, lambda: self._windows
        tools = Tools(ground.carrier, ground.roster, *own)
        vault, device = Vault(ground.settings.folder, config), devices.pick(0)
        self._tensor_bytes = math.prod(shape) * (2 if devices.uses_bf16(device, config.inner.precision) else 4)
        self._pace = tools.pace
        paths = LatestPaths(ground.settings.folder / PATHS_FILE)
        ends = self._committed, self._ended, paths.planned
        self.training = PipelineTraining(config, self.rounds, vault, tools, progress, device, *ends, ground.orders)
        ground.reporter.rounds, ground.reporter.place = self.rounds, self.training.place
        ground.reporter.paths, ground.reporter.wanted = (lambda: paths.message), (lambda: ground.orders.stage)

    async def close(self) -> None:
        """End what computes: at most one task is finished before, if it ends soon."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _keep(self, state: OuterState) -> None:
        await asyncio.to_thread(self._archive.save, at_rest(state, self._ground.reporter.progress.tokens))

    async def _committed(self, state: OuterState) -> None:
        ground = self._ground
        self._archive.note(state)
        ground.roster.keep(state.members)
        ground.committed(state, lines(self._pace.transfers(), ground.roster.round_trips(), self._tensor_bytes))
        now = tally.standing(state)
        log.info("round %d: step %d, loss %.4f, %d sites", state.round, now.steps, now.loss, len(state.members))

    async def _ended(self, model: Checkpoint) -> None:
        store = CheckpointStore(self._ground.settings.folder / "checkpoints", self._ground.config.hash())
        await asyncio.to_thread(store.save, model)

    def _rows(self, step: int, place: int) -> Rows:
        size = self._ground.config.inner.batch_size
        inputs, targets = self._windows.rows(step, place * size, size)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    @cached_property
    def _windows(self) -> Windows:
        """The site's part of the data; only sites of stage 0 ever look."""
        ground, config = self._ground, self._ground.config
        settings = ground.settings
        data = SiteData.of(config, ground.record.slot, settings.data, settings.shared_data)
        corpus = open_corpus(config.data, data.slot, data.slots, data.path, settings.folder / "cache")
        check_vocab(corpus.vocab_size, config.model.vocab_size)
        return Windows(corpus, config.model.context, config.run.seed, ground.carrier.node)


async def prepare(ground: Ground, stack: AsyncExitStack) -> PipelineSite:
    """From the disk, or else from the others. Raises PierError."""
    config, reporter = ground.config, ground.reporter
    devices.share_cores(1)

    def status() -> dict[str, object]:
        return reporter.status(ground.roster)

    archive = Archive(ground.settings.folder, config.hash(), lambda _: None, status, TALLIES)
    await ground.roster.settled()
    proofs = ground.proofs
    found = await archive.newest()
    if found:
        state, reporter.progress.tokens = found.state, found.tokens
    elif ground.record.founder:
        state = tally.beginning(config.pipeline.stages, ground.carrier.node)
        await asyncio.to_thread(proofs.add, [alone(state, b"", ground.statements)])
    else:
        reporter.progress.phase = Phase.PHASE_CATCHING_UP
        state, proof = await _from_peers(ground)
        await asyncio.to_thread(proofs.add, proof)
    ground.roster.keep(state.members)
    await asyncio.to_thread(archive.save, at_rest(state, reporter.progress.tokens))
    site = PipelineSite(ground, state, archive)
    stack.push_async_callback(site.close)
    return site


async def _from_peers(ground: Ground) -> tuple[OuterState, Sequence[Link]]:
    """The state of the run, as soon as anybody has one, and the proof of it."""
    carrier, roster, length = ground.carrier, ground.roster, tally.length(ground.config.pipeline.stages)
    while True:
        peers = [node for node in roster.ahead(-1) if (pulse := roster.pulse_of(node)) and pulse.digest]
        try:
            if peers:
                trust = first_trust(ground.settings.trust, ground.record.founded_by, ground.statements)
                got = await fetch_state(carrier, peers, length=length, timeout=SILENCE, trust=trust, progress=Arrival())
                return got.state, got.proof
        except PeerLost as lost:
            log.warning("cannot fetch the run's state yet: %s", lost.reason)
        await roster.changed.wait(1.0)


def at_rest(state: OuterState, tokens: int) -> Checkpoint:
    """The state of a run as a checkpoint, at a site that has trained on so many tokens."""
    return Checkpoint(state, None, None, 0, tally.standing(state).steps, tokens, None, ())
