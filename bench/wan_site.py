"""A site of bench/wan.py, in its own process: the real loop, rounds, roster and carrier (TLS); its compute is a sleep.

It reports its progress as each round's inner steps begin, and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.slow_links import HOSTS, enter
from bench.wan_grid import Task
from pier_node.base.shared import SharedVector
from pier_node.engine.messages import Done
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity, Signer, Token
from pier_node.outer.layout import Entry, Layout
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.proofs import PROOFS_FILE, Proofs
from pier_node.rounds.roster import Roster
from pier_node.rounds.state_store import Checkpoint
from pier_node.rounds.statements import SignedStatements
from pier_node.site.agreement import Agreement, InPairs, OfAll, Peers
from pier_node.site.loop import Orders, run_work
from pier_node.site.membership import Joined, pairs_of_two, rounds_of_all
from pier_node.site.report import Reporter
from pier_node.site.settings import Settings
from pier_node.site.training import Training
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_node.wire.states import StateServer, no_proof
from pier_proto.v1.peer_pb2 import Site

PORT = 7800


@dataclass(frozen=True)
class Mark:
    """A site as the inner steps of a round begin.

    Attributes:
        at: monotonic seconds, the same clock at both sites.
        sent: payload bytes so far.
        exchange: seconds that the last round that is over took.
    """

    at: float
    sent: int
    exchange: float


class Sleeper:
    """A trainer whose inner steps take their time and nothing else; then it publishes other weights, as workers do."""

    def __init__(self, length: int, step_seconds: float, begins: Callable[[], None]) -> None:
        self.outbox, self.adam_m, self.adam_v = (SharedVector(length) for _ in range(3))
        self._step_seconds, self._begins = step_seconds, begins

    async def run(
        self,
        first_step: int,
        steps: int,
        sequences: int,  # noqa: ARG002
        payload: Literal["weights", "gradient"],
        load: SharedVector,
        adam_step: int | None = None,  # noqa: ARG002
        on_progress: Callable[[Any], None] | None = None,  # noqa: ARG002
    ) -> Done:
        """Sleep; publish weights that are a little smaller, or a gradient that has the same effect."""
        self._begins()
        await asyncio.sleep(steps * self._step_seconds)
        factor = np.float32(0.999 if payload == "weights" else 0.001)
        await asyncio.to_thread(np.multiply, load.array, factor, out=self.outbox.array)
        return Done(0, steps, steps, first_step + steps, steps * self._step_seconds, 0)

    def enough(self) -> None:
        """It does all steps."""

    async def evaluate(self, weights: SharedVector) -> float:
        """There is nothing to evaluate."""
        return float(weights.array[0])


def main(rank: int, task: Task, space: str, folder: Path, marks: Any) -> None:
    """Train in a namespace until killed; puts (rank, Mark) into the queue `marks`, and (rank, str) of what went wrong.

    The other site's folder lies beside this one's.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        enter(space)
        asyncio.run(_train(rank, task, folder, lambda mark: marks.put((rank, mark))))
    except Exception:
        marks.put((rank, traceback.format_exc()))


async def _train(rank: int, task: Task, folder: Path, say: Callable[[Mark], None]) -> None:
    config = task.config()
    identities = [Identity.load_or_create(folder / str(each)) for each in (0, 1)]
    nodes, own = [each.node for each in identities], identities[rank]
    token = Token(bytes(32), config.hash()[:16])
    carrier, progress = GrpcCarrier(own.node, config.hash(), credentials(own, token)), Progress()
    sites = [Site(node=node, name=node, address=f"{host}:{PORT}") for node, host in zip(nodes, HOSTS, strict=True)]

    def begins() -> None:
        say(Mark(time.monotonic(), carrier.bytes_sent(), progress.round_time))

    reporter = Reporter(config, sites[rank], carrier, progress)
    roster, state = Roster(carrier, reporter.pulse), _beginning(nodes, task.parameters)
    signed, here = SignedStatements(Signer(own, config.hash())), folder / str(rank)
    site = Joined(config, Settings(here), carrier, roster, signed, Proofs(here / PROOFS_FILE), reporter)
    rounds = reporter.rounds = _rounds(task, site, state)
    StateServer(carrier, rounds.offer, no_proof if isinstance(rounds, PairRounds) else rounds.prove)
    keeping = asyncio.create_task(rounds.run()) if isinstance(rounds, Rounds) else None
    await carrier.start(HOSTS[rank], PORT)
    roster.add(sites[1 - rank])

    async def saved(state: OuterState) -> None:
        if isinstance(rounds, PairRounds):
            rounds.saved = max(rounds.saved, state.round)

    async def committed(checkpoint: Checkpoint, kept: Awaitable[object]) -> None:
        await kept
        await saved(checkpoint.state)

    layout = Layout((Entry("vector", (task.parameters,), 0),))
    trainer = Sleeper(task.parameters, task.step_seconds, begins)
    peers = Peers(carrier, roster, task.parameters)
    agreement: Agreement
    agreement = (
        InPairs(rounds, peers, progress, saved, None) if isinstance(rounds, PairRounds) else OfAll(rounds, peers)
    )
    await run_work(Training(config, layout, agreement, trainer, progress, committed), roster, Orders())
    if keeping:
        keeping.cancel()


async def _on_no_disk(state: OuterState) -> None:
    """What is measured is the network."""


def _rounds(task: Task, site: Joined, state: OuterState) -> Rounds | PairRounds:
    if site.config.outer.algorithm == "noloco":
        return pairs_of_two(site, state)
    return rounds_of_all(site, _on_no_disk, task.parameters, state)


def _beginning(nodes: list[str], length: int) -> OuterState:
    """Round 0, the same at both."""
    tensors = {ANCHOR: SharedVector(length), MOMENTUM: SharedVector(length)}
    tensors[ANCHOR].array[:] = np.random.default_rng(1).standard_normal(length, np.float32)
    state = OuterState(0, tuple(sorted(nodes)), tensors, {})
    _ = state.digest
    return state
