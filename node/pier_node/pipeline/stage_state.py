"""The stage state of a site: its state after the last outer round, this replica's own steps since, and staged steps.

A step is on disk before the site says that it is ready for it, and the state before it stays on disk. Whichever way the
round decides, a site that is killed in between finds the version that counts (pipeline/stage_step.py).

Between outer rounds a replica may step on its own. The result consists of its weights, AdamW's moments and the number
of microbatches seen. A step becomes the replica's own state when the round that decides about it counts it. If the site
cannot find out, because others have already counted later steps, it continues from the last outer round. It loses only
what this replica did since then.

A codec drops a part of what a replica brings to an outer round. That part, the residual, is on disk before the round is
decided, under the version of the stage that would result: it is brought again if, and only if, that version counts.

Stages given to other sites: to those that come back, to those that take up a stage of a model that the founder has, and
to those of stage 0 that join them into one model.

Every site of stage 0 joins the stages at the end of the run, in a checkpoint that `pier-node export`, `evaluate` and
`generate` read. For that moment it holds the whole model in host memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from weakref import ref

import numpy as np

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.mean import Update, norm_limit
from pier_node.outer.schedule import stepwise
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState, l2_norm
from pier_node.pipeline.beginnings import MOMENTS, Beginnings
from pier_node.pipeline.context import Tools
from pier_node.pipeline.outer_step import OuterStep, Tensors
from pier_node.pipeline.stage import gather, stage_layout
from pier_node.pipeline.stage_step import RECORDS, Repeat, VersionStore, after_step, clip, record_of
from pier_node.pipeline.vote_state import VoteState, round_of, vote_state_of
from pier_node.rounds.catch_up import Wanted, fetch_state
from pier_node.rounds.member import Rounds
from pier_node.rounds.state_store import KEEP, RESIDUAL, Checkpoint, StateStore
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, Chunk, PeerLost
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import FetchRequest, Manifest, StateRequest, Total

log = logging.getLogger(__name__)

BASE, MICROBATCHES = "base", "microbatches"
"""Entries of a state's ledger: the version that it began from, and the number of microbatches since then."""


class Own:
    """The own steps of one site, in `folder`.

    Args:
        repeat: repeats a step from its record.

    Attributes:
        state: after the last step that counts; None: there is none. Its `round` identifies the attempt, as in versions.
    """

    def __init__(self, folder: Path, run_hash: bytes, repeat: Repeat) -> None:
        self._disk = VersionStore(folder, run_hash, repeat)
        self.state: OuterState | None = None
        self._open: dict[int, OuterState] = {}

    def resume(self, decided: int, counted: int, ready: int) -> None:
        """Load what is on disk after a start; remove steps that did not count. Blocks. Raises PierError.

        Args:
            decided: the last round whose outcome this site knew.
            counted: the version that counted last.
            ready: the last round that counted and for which this site was ready; 0: none.
        """
        for version in self._disk.rounds():
            found, round = self._disk.of(version), round_of(version)
            counts = round <= ready and (version == counted or round < round_of(counted))
            if found and round > decided:
                self._open[version] = found
            elif found and counts:
                self.state = found
                return
            elif counts:
                log.error("what this replica did in round %d, apart from others, cannot be read and is lost", round)
            elif found:  # it ended after the outcome was on disk and before this was removed
                self._disk.drop(version)

    def keep(self, state: OuterState, record: OuterState | None = None) -> None:
        """Keep a step on disk until it is known whether it counts. Blocks. Raises PierError."""
        self._disk.keep(state, self.state.round if self.state else None, record)
        self._open[state.round] = state

    def settle(self, known: Collection[int], counted: int, decided: int) -> bool:
        """Take the kept step that counts, if any. Returns whether the state has changed. Blocks. Raises PierError.

        Args:
            known: versions that are certain to have counted.
            counted: the version that counted last.
            decided: the last round whose outcome this site knows.
        """
        if not self._open:
            return False
        tried = max(round_of(version) for version in self._open)
        taken = next((state for version, state in self._open.items() if version in known), None)
        if taken is None and decided < tried:
            return False
        if taken is None and round_of(counted) > tried:
            log.warning("what this replica did since the last outer round is lost: did its last step count?")
            self.forget()
            return True
        for version in self._open.keys() - known:
            self._disk.drop(version)
        self._open.clear()
        self.state = taken or self.state
        return taken is not None

    def rest(self) -> None:
        """See StageState. Blocks. Raises PierError."""
        if self.state:
            self._disk.keep_in_full(self.state)

    def forget(self) -> None:
        """Drop all own steps. Blocks. Raises PierError."""
        self.state = None
        self._open.clear()
        for version in self._disk.rounds():
            self._disk.drop(version)


ABSENT = 1
"""A version that no stage ever has (vote_state.version)."""


class StageState:
    """The stage state of one site, in `folder`.

    Attributes:
        stage: number of the stage; None: it holds none yet.
        state: of the stage, the same at all replicas unless they meet in pairs; its `round` is its version. None: it is
            to be fetched.
        own: the steps that this replica took on its own since.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder, self._config = folder, config
        self.beginnings = Beginnings(folder, config)
        self.stage: int | None = next((int(it.name.partition("-")[2]) for it in sorted(folder.glob("stage-*"))), None)
        self.state: OuterState | None = None
        self.own = Own(folder / "own", config.hash(), self._after)
        self._residuals = StateStore(folder / RESIDUAL, config.hash())
        self._staged: OuterState | None = None

    @property
    def version(self) -> int:
        """Version of the state; 0: the initial weights; ABSENT: there is none."""
        return self.state.round if self.state else ABSENT

    @property
    def done(self) -> OuterState | None:
        """The state after this replica's own steps; None: it has taken none."""
        own = self.own.state
        return own if own and own.ledger[BASE] == self.version else None

    @property
    def working(self) -> OuterState:
        """The state from whose weights and moments the next step begins."""
        state = self.done or self.state
        assert state
        return state

    def version_of(self, counts: int) -> int:
        """Version of the state, given the one that counts: a staged step of that version is as good as taken."""
        return counts if self._staged and self._staged.round == counts else self.version

    def hold(self, stage: int) -> None:
        """Hold a stage from now on, with what it begins with if that is here. Blocks. Raises PierError."""
        self.stage = stage  # first: the next plan may come meanwhile
        state = self.beginnings.of(stage)
        if state:
            self._disk.keep(state)
            self.state = state

    def load(self, version: int) -> bool:
        """Load a version from disk. Returns whether this site has it. Blocks."""
        if self.stage is None:
            return False
        found = self._disk.of(version)
        if found is None and version == 0:
            found = self.beginnings.of(self.stage)
        self.state = found or self.state
        return found is not None

    async def fetch(self, version: int, carrier: Carrier, peers: list[str]) -> None:
        """Fetch a version from replicas, or version 0 from the founder. Raises PeerLost: none had it."""
        assert self.stage is not None
        got = await fetch_version(carrier, peers, Wanted(self._layout.length, version, stage=self.stage + 1))
        state = got if version else await asyncio.to_thread(self.beginnings.with_weights, got.anchor)
        await asyncio.to_thread(self._disk.keep, state)
        self.state = state

    def rest(self) -> None:
        """Keep in full what the next start, maybe with another PyTorch, continues from. Blocks. Raises PierError."""
        if self.state:
            self._disk.keep_in_full(self.state)
        self.own.rest()

    # --- the next step ---------------------------------------------------------------------------

    def stepped(self, gradient: Vector, total: Total, step: int, version: int) -> OuterState:
        """Stage an AdamW step of all replicas on disk and return its state; this one stays. Blocks. Raises PierError.

        Args:
            gradient: mean over the microbatches, shape [parameters of the stage].
            total: its square is that of the whole model's gradient, by whose norm the gradient is clipped.
            step: index of the step in the whole run.
        """
        assert self.state
        record = record_of(clip(self._config.inner, gradient, total.square), step, self.state, version, {})
        self._staged = state = self._after(self.state, record)
        self._disk.keep(state, self.state.round, record)
        return state

    def step_apart(self, gradient: Vector, total: Total, step: int, version: int, microbatches: int) -> None:
        """The same for this replica alone, with the gradient of this site's microbatches. Blocks. Raises PierError."""
        seen = self.done.ledger[MICROBATCHES] if self.done else 0
        ledger = {BASE: self.version, MICROBATCHES: seen + microbatches}
        own = {name: it for name, it in self.working.tensors.items() if name != MOMENTUM}
        before = replace(self.working, tensors=own)
        record = record_of(clip(self._config.inner, gradient, total.square), step, before, version, ledger)
        self.own.keep(self._after(before, record), record)

    def brought(self, step: OuterStep) -> Update:
        """What this replica brings to an outer round. Blocks. Raises PierError."""
        lost = self._residuals.of(self.version) if step.codec.lossy else None
        residual = lost.tensors[RESIDUAL].array if lost else None
        return Update(self._moved(step), 1, residual=residual, decay=np.float32(self._config.outer.error_decay))

    def _moved(self, step: OuterStep) -> Vector:
        """What it has to say of its own steps; weight 0 if there are none."""
        assert self.state
        anchor, done = self.state.anchor, self.done
        if done is None:
            return step.brought(anchor, anchor, 0)
        norm = float(np.linalg.norm((anchor - done.anchor).astype(np.float64)))
        if norm <= norm_limit(l2_norm(anchor)):
            return step.brought(anchor, done.anchor, done.ledger[MICROBATCHES])
        log.error("this replica's update is dropped: its norm is %.3g: lower inner.lr?", norm)
        self.own.forget()
        return step.brought(anchor, anchor, 0)

    def meet(self, tensors: Tensors, version: int, error: SharedVector | None) -> None:
        """Stage the state after an outer step; AdamW's moments stay unchanged. Blocks. Raises PierError.

        Args:
            error: what the codec dropped of this replica's vector and of the means of its shard.
        """
        assert self.state
        if error is not None:
            self._residuals.keep(OuterState(version, (), {RESIDUAL: error}, {}), (self.state.round,))
        before, ledger = self.working, {BASE: version, MICROBATCHES: 0}
        moments = {name: before.tensors[name] for name in MOMENTS if name in before.tensors}
        if moments:
            self.own.keep(OuterState(version, (), {ANCHOR: tensors[ANCHOR], **moments}, ledger, before.adam_step))
        self._staged = OuterState(version, (), tensors, {})
        self._disk.keep(self._staged, self.state.round)

    def settle(self, voted: VoteState, decided: int) -> bool:
        """Take the staged state that counts. Returns whether the weights have changed. Blocks. Raises PierError.

        Args:
            voted: of the run after the round `decided`.
        """
        if self.stage is None:
            return False
        staged, self._staged = self._staged, None
        wanted = voted.versions[self.stage]
        if moved := staged is not None and staged.round == wanted:
            self.state = staged
        return self.own.settle({voted.counted, wanted}, voted.counted, decided) or moved

    def _after(self, before: OuterState, record: OuterState) -> OuterState:
        return after_step(self._config, self._layout, before, record)

    @property
    def _layout(self) -> Layout:
        assert self.stage is not None
        return stage_layout(self._config.model, self._config.pipeline.stages, self.stage)

    @property
    def _disk(self) -> VersionStore:
        return VersionStore(self._folder / f"stage-{self.stage}", self._config.hash(), self._after)


def disk_bytes(config: RunConfig) -> int:
    """Bytes per parameter of the stage that a stage state takes on disk at most, while it writes and after failures."""
    apart, residual = config.outer.algorithm != "sync", 4 * (config.outer.codec != "none")
    versions, own = KEEP + 2, RECORDS + 3 * 12  # one counts, one is being written, and failed attempts leave the others
    # After an outer step a version has weights and momentum; only the one that a stage begins with has moments, too.
    stage = RECORDS + versions * (12 + 4 * apart) if stepwise(config) else versions * 8 + 8
    return stage + apart * own + (KEEP + 1) * residual


PATIENCE = 30.0
"""Seconds to wait for a site that has a stage as it is after its last step."""


class StateSharing:
    """Serves to peers that request them: the state of the run, that of this site's stage, and what stages begin with.

    Only the founder gives the last. It reads a stage from its disk when a site asks, and keeps it in memory for as long
    as sites fetch it.
    """

    def __init__(self, carrier: Carrier, rounds: Rounds, stage_state: StageState, stages: int) -> None:
        self._stage_state = stage_state
        self._of_stage = StateServer(carrier, self._offer)
        self._given = [_Given(carrier, stage_state.beginnings, stage) for stage in range(stages)]
        self._of_run = StateServer(carrier, rounds.offer, rounds.prove)
        carrier.serve(DESCRIBE, self._describe)
        carrier.serve_pull(self._fetch)

    def _offer(self, version: int, _shadow: bool) -> OuterState | None:
        state = self._stage_state.state
        return state if state and version in (0, state.round) else None

    async def _describe(self, peer: str, request: StateRequest) -> Manifest:
        return await self._server(request.stage).describe(peer, request)

    async def _fetch(self, peer: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        async for chunk in self._server(request.stage).fetch(peer, request):
            yield chunk

    def _server(self, stage: int) -> StateServer | _Given:
        if not stage:
            return self._of_run
        if stage - 1 == self._stage_state.stage:
            return self._of_stage
        if stage > len(self._given):
            raise BadMessage(f"this run has no stage {stage - 1}")
        return self._given[stage - 1]


class _Given:
    """Serves what one stage begins with."""

    def __init__(self, carrier: Carrier, beginnings: Beginnings, stage: int) -> None:
        self._beginnings, self._stage = beginnings, stage
        self._state: Callable[[], OuterState | None] = lambda: None
        self._reading: asyncio.Future[OuterState | None] | None = None
        self._server = StateServer(carrier, lambda version, shadow: None if version or shadow else self._state())

    async def describe(self, peer: str, request: StateRequest) -> Manifest:
        """The manifest of what it begins with. Raises BadMessage."""
        state = None if request.round or request.shadow else self._state() or await self._read()
        if state is None:
            raise BadMessage(f"stage {self._stage} is not held here like that")
        self._state = ref(state)  # the server holds it for as long as someone fetches it
        return await self._server.describe(peer, request)

    async def _read(self) -> OuterState | None:
        """Read it once for all that ask meanwhile. Whoever does not wait so long finds it as it asks again."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._beginnings.given, self._stage))
        reading = self._reading
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._reading = None

    def fetch(self, peer: str, request: FetchRequest) -> AsyncIterator[Chunk]:
        """Stream a run of pieces of it. Raises BadMessage."""
        return self._server.fetch(peer, request)


async def fetch_version(carrier: Carrier, peers: list[str], wanted: Wanted) -> OuterState:
    """Fetch a version of a stage. Raises PeerLost: nobody has that one."""
    state = (await fetch_state(carrier, peers, wanted)).state
    if state.round != wanted.round:  # 0, the version that stages begin with, asks for the newest one
        raise PeerLost(peers[0], f"the stage is in version {state.round} there")
    return state


async def holders(tools: Tools, stage: int, version: int, patience: float) -> list[str]:
    """Live peers that have a version of a stage, according to pulses that may be a moment old; version 0 may be given.

    Raises PeerLost: there were none for `patience` seconds.
    """

    def found() -> list[str]:
        pulses = tools.roster.pulses()
        places = {node: it.place for node, it in pulses.items() if it.HasField("place")}
        has = [node for node, it in places.items() if it.stage == stage and it.version == version]
        if version == 0:
            giving = [node for node, it in pulses.items() if it.gives and node not in has]
            has += [node for node in giving if tools.founder in ("", node)]
        return [node for node in has if node != tools.carrier.node]

    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            await tools.roster.changed.until(lambda: bool(found()))
    if not (peers := found()):
        raise PeerLost("", f"no site that has stage {stage} like that is here")
    return peers


async def joined(config: RunConfig, state: OuterState, stage_state: StageState, tools: Tools) -> Checkpoint:
    """The whole model after the last step. Raises PierError: a stage is not available."""
    now, whole = vote_state_of(state), SharedVector(Layout.of(config.model).length)
    parts: dict[int, Vector] = {}
    for stage in range(config.pipeline.stages):
        try:
            parts[stage] = await _part(config, now, stage, stage_state, tools)
        except PeerLost as lost:
            raise PierError(
                f"the stages cannot be joined: nobody gives stage {stage} as it is after its last step: {lost.reason}",
                "Start a site that held it, and this one again: `pier-node start --data FOLDER`.",
            ) from lost
    await asyncio.to_thread(gather, config.model, config.pipeline.stages, parts, whole.array)
    tensors = {ANCHOR: whole, MOMENTUM: SharedVector(len(whole.array))}
    return Checkpoint(OuterState(state.round, state.members, tensors, state.ledger), inner_step=now.steps)


async def _part(config: RunConfig, now: VoteState, stage: int, stage_state: StageState, tools: Tools) -> Vector:
    version = now.versions[stage]
    if stage_state.stage == stage and stage_state.state and stage_state.version == version:
        return stage_state.state.anchor
    if version == 0 and (beginning := await asyncio.to_thread(stage_state.beginnings.of, stage)):
        return beginning.anchor
    length = stage_layout(config.model, config.pipeline.stages, stage).length
    wanted, deadline = Wanted(length, version, stage=stage + 1), asyncio.get_running_loop().time() + PATIENCE
    while True:
        peers = await holders(tools, stage, version, PATIENCE)
        try:
            return (await fetch_version(tools.carrier, peers, wanted)).anchor
        except PeerLost:  # a pulse counts a step that is stored there and not taken yet
            if asyncio.get_running_loop().time() > deadline:
                raise
            await tools.roster.changed.wait(1.0)
