"""How a replica comes back: it resumes from its disk, after a crash as after a stop, and starts only if that is empty.

For a stage of a pipeline see pipeline/stage_state.py, for an expert experts/resume.py.

On disk are its checkpoints, and the committed states that other sites rely on (rounds/state_store.py): a state may be
there before its checkpoint is. What the site has promised and voted is in its journal (journal.py), which its rounds
read as they begin. A site that has nothing yet founds the run, or fetches the newest state from the others
(bootstrap.py). What it missed meanwhile it fetches like every site that is behind: rounds/catch_up.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.engine.program import Program
from pier_node.outer.layout import Layout
from pier_node.outer.state import OuterState
from pier_node.rounds.proofs import alone
from pier_node.rounds.state_store import CHECKPOINTS, STATES, Checkpoint, StateStore
from pier_node.site.bootstrap import beginning, from_pairs, from_peers
from pier_node.site.membership import Joined
from pier_proto.v1.peer_pb2 import Link


class Stores(NamedTuple):
    """A replica's committed states and its checkpoints, on disk."""

    states: StateStore
    checkpoints: StateStore

    @classmethod
    def of(cls, folder: Path, config: RunConfig) -> Stores:
        """Those in a site's data folder."""
        states = StateStore(folder / STATES, config.hash())
        return cls(states, StateStore(folder / CHECKPOINTS, config.hash(), shares=states))


class Resumed(NamedTuple):
    """Where a replica continues.

    Attributes:
        checkpoint: what it trains on from.
        state: the last committed state: the checkpoint's, or a later one that was kept without a checkpoint.
        how: "Resuming" or "Starting".
    """

    checkpoint: Checkpoint
    state: OuterState
    how: str


async def resume(joined: Joined, layout: Layout, stores: Stores, program: Program | None) -> Resumed:
    """Continue from the disk, or else begin. Raises PierError.

    Args:
        program: the program of the site's owner, whose weights a founder begins with; None: Pier's own trainer.
    """
    states, checkpoints = stores
    await joined.roster.settled()
    checkpoint = await asyncio.to_thread(checkpoints.newest)
    how = "Resuming" if checkpoint else "Starting"
    if checkpoint is None:
        checkpoint = await _first(joined, layout, states, program)
        await asyncio.to_thread(states.keep, checkpoint.state)
    state = await asyncio.to_thread(states.after, checkpoint.state.round) or checkpoint.state
    joined.roster.keep(state.members)
    await asyncio.to_thread(lambda: (state.digest, state.norm))
    return Resumed(checkpoint, state, how)


async def _first(joined: Joined, layout: Layout, states: StateStore, program: Program | None) -> Checkpoint:
    """The first checkpoint of a site that has none on disk."""
    kept = await asyncio.to_thread(states.after, -1)
    if kept:
        return Checkpoint(kept)
    config, carrier = joined.config, joined.carrier
    proof: Sequence[Link]
    if joined.record.founder:
        weights = program.outbox.array if program else await asyncio.to_thread(_given_weights, joined)
        checkpoint = await asyncio.to_thread(beginning, config, layout, carrier.node, weights)
        proof = [alone(checkpoint.state, b"", joined.statements)]
    else:
        joined.joins_others()
        if config.outer.algorithm == "noloco":
            return await from_pairs(config, layout.length, carrier, joined.standing)
        checkpoint, proof = await from_peers(config, layout.length, carrier, joined.roster, joined.first_trust)
    await asyncio.to_thread(joined.proofs.add, proof)
    return checkpoint


def _given_weights(joined: Joined) -> Vector | None:
    """The weights to found a run from, if they are not those of its seed. Raises PierError."""
    folder = joined.settings.weights
    if folder is None:
        return None
    from pier_node.trainer.model.hub import import_weights  # with torch, which the daemon otherwise avoids

    _, flat = import_weights(folder)
    joined.say(f"The run starts from the weights in {folder}.")
    weights: Vector = flat.numpy()
    return weights
