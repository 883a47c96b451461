"""Joins the stages of a run into one model, in a checkpoint that `pier-node export`, `evaluate` and `generate` read.

Every site of stage 0 does this at the end of the run. For that moment it holds the whole model in host memory.
"""

from __future__ import annotations

import asyncio

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.context import Tools, holders
from pier_node.pipeline.stage import gather, stage_layout
from pier_node.pipeline.stage_state import StageState, made
from pier_node.pipeline.vote_state import Standing, standing
from pier_node.rounds.fetch import Wanted, fetch_state
from pier_node.rounds.state_store import Checkpoint
from pier_node.wire.carrier import PeerLost

PATIENCE = 30.0


async def joined(config: RunConfig, state: OuterState, stage_state: StageState, tools: Tools) -> Checkpoint:
    """The whole model after the last step. Raises PierError: a stage is not available.

    Args:
        state: the state of the run.
        stage_state: the stage that this site holds.
    """
    now, whole = standing(state), SharedVector(Layout.of(config.model).length)
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


async def _part(config: RunConfig, now: Standing, stage: int, stage_state: StageState, tools: Tools) -> Vector:
    version = now.versions[stage]
    if stage_state.stage == stage and stage_state.state and stage_state.version == version:
        return stage_state.state.anchor
    if version == 0:
        return await asyncio.to_thread(made, config, stage)
    length = stage_layout(config.model, config.pipeline.stages, stage).length
    peers = await holders(tools, stage, version, PATIENCE)
    got = await fetch_state(tools.carrier, peers, Wanted(length, version, stage=stage + 1))
    return got.state.anchor
