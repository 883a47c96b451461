"""How long the event loop of a daemon stands still while a model of some size goes through rounds.

Two sites in this process, over loopback, without TLS and without a disk. A task in the same loop sleeps for a
millisecond at a time; the longest time for which it did not get its turn is the stall. A peer counts as silent after 5
s.

    python -m bench.loop_stall --megabytes 200
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import numpy as np

from bench.wan_site import Sleeper
from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.identity.node import Identity, Signer
from pier_node.outer.advance import get_ready
from pier_node.outer.layout import Entry, Layout
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.progress import Progress
from pier_node.rounds.proofs import PROOFS_FILE, Proofs
from pier_node.rounds.roster import Roster
from pier_node.rounds.state_store import Checkpoint
from pier_node.rounds.statements import SignedStatements
from pier_node.site.agreement import OfAll, Peers
from pier_node.site.loop import Orders, run_work
from pier_node.site.membership import Joined, rounds_of_all
from pier_node.site.report import Reporter
from pier_node.site.settings import Settings
from pier_node.site.training import Training
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import Site

TICK = 0.001
HOST = "127.0.0.1"


class Watch:
    """Ticks in the loop, and remembers the longest time between two ticks."""

    def __init__(self) -> None:
        self.stall = 0.0

    async def run(self) -> None:
        """For ever."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK)
            self.stall = max(self.stall, time.monotonic() - began - TICK)


async def site(config: RunConfig, folder: Path, identity: Identity, met: list[Site], state: OuterState) -> None:
    """Train to the end of the run, with those that are in the list."""
    node = identity.node
    carrier, progress = GrpcCarrier(node, config.hash(), None), Progress()
    statements = SignedStatements(Signer(identity, config.hash()))
    me = Site(node=node, name=node, address=f"{HOST}:{await carrier.start(HOST, 0)}")

    async def nothing(_state: OuterState) -> None:
        """No disk."""

    async def committed(_checkpoint: Checkpoint, kept: Awaitable[object]) -> None:
        await kept

    length = len(state.anchor)
    reporter = Reporter(config, me, carrier, progress)
    roster = Roster(carrier, reporter.pulse)
    proofs = Proofs(folder / PROOFS_FILE)
    site = Joined(config, Settings(folder), carrier, roster, statements, proofs, reporter)
    rounds = reporter.rounds = rounds_of_all(site, nothing, length, state)
    StateServer(carrier, rounds.offer)
    keeping = asyncio.create_task(rounds.run())
    for other in met:  # the second one makes itself known by its beats
        roster.add(other)
    met.append(me)
    trainer = Sleeper(length, 0.5, lambda: None)
    layout = Layout((Entry("vector", (length,), 0),))
    agreement = OfAll(rounds, Peers(carrier, roster, length))
    await run_work(Training(config, layout, agreement, trainer, progress, committed), roster, Orders())
    keeping.cancel()
    await asyncio.sleep(1)  # until the other has heard of the last vote
    await roster.stop()
    await carrier.stop()


async def measure(megabytes: int, rounds: int, codec: str) -> float:
    """The longest stall, in seconds."""
    length = megabytes * (1 << 20) // 4
    config = RunConfig.model_validate(
        {
            "run": {"sites": 2},
            "inner": {"total_steps": rounds, "eval_every": 0},
            "outer": {"algorithm": "diloco", "inner_steps": 1, "codec": codec},
        }
    )
    with tempfile.TemporaryDirectory() as work:
        folders = [Path(work) / name for name in "ab"]
        identities = [Identity.load_or_create(folder) for folder in folders]
        tensors = {ANCHOR: SharedVector(length), MOMENTUM: SharedVector(length)}
        tensors[ANCHOR].array[:] = np.random.default_rng(1).standard_normal(length, np.float32)
        state = OuterState(0, tuple(sorted(each.node for each in identities)), tensors, {})
        _ = state.digest, state.norm
        get_ready(config)
        watch, met = Watch(), list[Site]()
        watching = asyncio.create_task(watch.run())
        sites = zip(folders, identities, strict=True)
        await asyncio.gather(*(site(config, folder, identity, met, state) for folder, identity in sites))
        watching.cancel()
    return watch.stall


def main() -> None:
    """Print the stall."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="of the model, in fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="none")
    asked = parser.parse_args()
    stall = asyncio.run(measure(asked.megabytes, asked.rounds, asked.codec))
    print(f"{asked.megabytes} MB, {asked.rounds} rounds, codec {asked.codec}: the loop stood for {stall * 1000:.0f} ms")


if __name__ == "__main__":
    main()
