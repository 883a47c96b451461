"""How a replica begins and comes back: it resumes from its disk, after a crash as after a stop, or else it is new.

For a stage of a pipeline see pipeline/stage_state.py, for an expert experts/resume.py.

On disk are its checkpoints, and the committed states that other sites rely on (rounds/state_store.py): a state may be
there before its checkpoint is. What the site has promised and voted is in its journal (journal.py), which its rounds
read as they begin. What it missed meanwhile it fetches like every site that is behind: rounds/catch_up.py. The first
state of a site that has nothing yet is created from the run's seed at the founder, and fetched from peers elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.engine.program import Program
from pier_node.gossip.catch_up import CatchUpInPairs
from pier_node.gossip.standing import Standing
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import start_steps
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.catch_up import Arrival, Fetched, Tries, Wanted, fetch_state
from pier_node.rounds.proofs import Trust, alone
from pier_node.rounds.roster import Roster
from pier_node.rounds.state_store import CHECKPOINTS, STATES, Checkpoint, StateStore
from pier_node.site.membership import Joined
from pier_node.wire.carrier import Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Link

log = logging.getLogger(__name__)


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


def beginning(config: RunConfig, layout: Layout, node: str, weights: Vector | None = None) -> Checkpoint:
    """Round 0 of a run, at its founder: weights from the run's seed, or these, shape [parameters]; no momentum.

    Raises PierError: there is no seed for the weights of this model.
    """
    if weights is None and config.begins_pretrained:
        raise no_weights(config)
    tensors = {ANCHOR: SharedVector(layout.length), MOMENTUM: SharedVector(layout.length)}
    if weights is None:
        from pier_node.trainer.model.initial import initial_weights

        tensors[ANCHOR].array[:] = initial_weights(config.model, config.run.seed).numpy()
    else:
        tensors[ANCHOR].array[:] = weights
    return Checkpoint(OuterState(0, (node,), tensors, {}))


def no_weights(config: RunConfig) -> PierError:
    """A founder has no weights for a run that begins with those of a model."""
    kind = config.model.transformers.kind if config.model.transformers else config.model.form
    return PierError(
        f"the run begins with the weights of a {kind} that has been trained before, and this site has none",
        "Give the folder that run.toml was made from: pier-node start --from FOLDER.",
    )


async def from_peers(
    config: RunConfig, length: int, carrier: Carrier, roster: Roster, trust: Callable[[], Trust | None]
) -> tuple[Checkpoint, Sequence[Link]]:
    """Fetch the newest state of the run, and the proof that the state was committed.

    During a solo start there is nothing to join: this waits until the solo start is over.

    Args:
        trust: returns what this site trusts; None: it accepts any state.
    """
    fetched = await first_state(carrier, roster, lambda: Wanted(length, trust=trust()), _first_to_join(config))
    return Checkpoint(fetched.state), fetched.proof


async def from_pairs(config: RunConfig, length: int, carrier: Carrier, standing: Standing) -> Checkpoint:
    """Fetch a state of a run of pairs from sites that have standing there."""
    first, told = _first_to_join(config), ""
    catch_up = CatchUpInPairs(carrier, standing, length)
    while True:
        if state := await catch_up.state(lambda: standing.beyond(first - 1), None):
            return Checkpoint(state)
        if (why := _nothing_to_take(standing, first)) != told:
            log.info("%s", why)
            told = why
        await standing.roster.changed.wait(1.0)


def _nothing_to_take(standing: Standing, first: int) -> str:
    if standing.peers():
        return _waits_for_start(first)
    if any(pulse.digest for pulse in standing.roster.pulses().values()):
        return "the sites here have not met the run's founder, nor a site that has: waiting for one of those"
    return "no site that has a state is here yet"


def _waits_for_start(first: int) -> str:
    return f"one site makes the run's start alone; this one joins at round {first + 1}"


def _first_to_join(config: RunConfig) -> int:
    """The earliest round whose state others may take: a solo start is left to the site that makes it."""
    return start_steps(config) // config.outer.inner_steps if config.outer.start == "solo" else 0


async def first_state(carrier: Carrier, roster: Roster, wanted: Callable[[], Wanted], first: int = 0) -> Fetched:
    """Fetch the newest state of the run, as soon as any site has one.

    Args:
        wanted: returns what to fetch, and what this site trusts.
        first: the earliest round to join; the one site that makes the rounds before it is left alone.
    """
    tries, told = Tries(), False
    while True:
        peers = [node for node in roster.ahead(-1) if (pulse := roster.pulse_of(node)) and pulse.digest]
        ready = tries.order(node for node in peers if (pulse := roster.pulse_of(node)) and pulse.round >= first)
        if ready:
            try:
                return await fetch_state(carrier, ready, wanted(), tries, Arrival())
            except PeerLost as lost:
                log.warning("cannot fetch the run's state yet: %s", lost.reason)
        elif peers and not told:
            log.info("%s", _waits_for_start(first))
            told = True
        await roster.changed.wait(1.0)
