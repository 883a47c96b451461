"""Stages given to other sites: to those that come back, and to those of stage 0 that join them into one model.

Every site of stage 0 joins the stages at the end of the run, in a checkpoint that `pier-node export`, `evaluate` and
`generate` read. For that moment it holds the whole model in host memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.context import Tools
from pier_node.pipeline.stage import gather, stage_layout
from pier_node.pipeline.stage_state import StageState, made
from pier_node.pipeline.vote_state import VoteState, vote_state_of
from pier_node.rounds.catch_up import Wanted, fetch_state
from pier_node.rounds.member import Rounds
from pier_node.rounds.state_store import Checkpoint
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, PeerLost
from pier_node.wire.chunk import Chunk
from pier_node.wire.state_server import StateServer
from pier_proto.v1.peer_pb2 import FetchRequest, Manifest, StateRequest

PATIENCE = 30.0
"""Seconds to wait for a site that has a stage as it is after its last step."""


class StateSharing:
    """Serves the state of the run, and the state of the stage that this site holds, to peers that request them."""

    def __init__(self, carrier: Carrier, rounds: Rounds, stage_state: StageState) -> None:
        self._stage_state = stage_state
        self._of_stage = StateServer(carrier, self._offer)
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

    def _server(self, stage: int) -> StateServer:
        if stage and stage - 1 != self._stage_state.stage:
            raise BadMessage(f"stage {stage - 1} is not held here")
        return self._of_stage if stage else self._of_run


async def holders(tools: Tools, stage: int, version: int, patience: float) -> list[str]:
    """Live peers that have a version of a stage, according to pulses that may be a moment old.

    Raises PeerLost: there were none for `patience` seconds.
    """

    def found() -> list[str]:
        places = {node: it.place for node, it in tools.roster.pulses().items() if it.HasField("place")}
        has = [node for node, it in places.items() if it.stage == stage and it.version == version]
        return [node for node in has if node != tools.carrier.node]

    with suppress(TimeoutError):
        async with asyncio.timeout(patience):
            await tools.roster.changed.until(lambda: bool(found()))
    if not (peers := found()):
        raise PeerLost("", f"no site that has stage {stage} like that is here")
    return peers


async def joined(config: RunConfig, state: OuterState, stage_state: StageState, tools: Tools) -> Checkpoint:
    """The whole model after the last step. Raises PierError: a stage is not available.

    Args:
        state: the state of the run.
        stage_state: the stage that this site holds.
    """
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
    model = OuterState(state.round, state.members, tensors, state.ledger)
    return Checkpoint(model, inner_step=now.steps)


async def _part(config: RunConfig, now: VoteState, stage: int, stage_state: StageState, tools: Tools) -> Vector:
    version = now.versions[stage]
    if stage_state.stage == stage and stage_state.state and stage_state.version == version:
        return stage_state.state.anchor
    if version == 0:
        return await asyncio.to_thread(made, config, stage)
    length = stage_layout(config.model, config.pipeline.stages, stage).length
    wanted, deadline = Wanted(length, version, stage=stage + 1), asyncio.get_running_loop().time() + PATIENCE
    while True:
        peers = await holders(tools, stage, version, PATIENCE)
        try:
            return (await fetch_state(tools.carrier, peers, wanted)).state.anchor
        except PeerLost:  # a pulse counts a step that is stored there and not taken yet
            if asyncio.get_running_loop().time() > deadline:
                raise
            await tools.roster.changed.wait(1.0)
