"""What a daemon finds in a simulation instead of a network, workers, a status page and a coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from simulation.cluster import LENGTH, FakeTrainer
from simulation.keys import IDENTITIES, NODES
from simulation.process import Process, this_process
from simulation.wire import HuntCarrier

from pier_node.base.faults import Faults
from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.engine.device import Device
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.outer.layout import Layout
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.folder import SiteRecord
from pier_node.rounds.member import Rounds
from pier_node.rounds.state_store import Checkpoint
from pier_node.site import daemon, replica, resume
from pier_node.site.daemon import Daemon
from pier_node.site.join import Membership
from pier_node.site.loop import Orders
from pier_node.site.membership import pairs_of_two, rounds_of_all
from pier_node.site.replica import Replica
from pier_node.site.settings import Settings
from pier_node.wire.carrier import GREETING, PROTOCOL, PeerLost
from pier_proto.v1.peer_pb2 import HelloRequest, Site

LAYOUT = Layout.laid([("weights", (LENGTH,))])


@dataclass(frozen=True)
class HuntSettings(Settings):
    """Settings of a site whose faults are a schedule's."""

    strike: Callable[[int, str], Awaitable[None]] | None = None

    @property
    def faults(self) -> Faults:
        """Where the schedule has this site die."""
        return Faults(self.strike)


class HuntDaemon(Daemon):
    """The daemon, with orders of a coordinator that is in this process; it shows what it is made of."""

    def __init__(self, here: Process, settings: Settings) -> None:
        super().__init__(settings, here.say)
        self._here = here

    def _coordination(self, _entrance: Any) -> Any:
        return Ordered(self._here.orders)


class HuntReplica(Replica):
    """The replica, which shows what it is made of."""

    async def begin(self, stack: AsyncExitStack, checkpoint: Checkpoint) -> None:
        """See Replica."""
        await super().begin(stack, checkpoint)
        this_process().training = self.training

    def saved(self, state: OuterState) -> None:
        """See Replica."""
        super().saved(state)
        here = this_process()
        here.world.saved(here, state)


class Ordered:
    """Stands for Coordination in site/coordinator/client.py, with its client and recorder: there are orders only."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.revoked = orders, None
        self.client = self.recorder = self

    async def run(self) -> None:
        """The client never ends."""
        await asyncio.Event().wait()

    sample = run

    async def enter(self, record: SiteRecord | None) -> SiteRecord | None:
        """The site is as it says."""
        return record

    async def close(self, *_error: Any) -> None:
        """Nobody waits for its last words."""

    def round(self, state: OuterState, lines: Any) -> Callable[[], None]:
        """A round is told."""
        return lambda: None


class HuntWorkers(FakeTrainer):
    """Stands for Pier's own trainer: trainer/command.py."""

    def __init__(self, *_: Any) -> None:
        here = this_process()
        world = here.world
        dice = world.dice_of(f"{here.site} {here.number}")
        super().__init__(world.names.index(here.site), world.paces[here.site], dice)
        self.device = Device()
        self.recover_moments: Callable[[], Any] = lambda: None
        here.trainer = self

    async def start(self) -> None:
        """Workers take a moment to start."""
        await asyncio.sleep(self.pace)

    async def stop(self) -> None:
        """They end at once."""

    def moments_unchanged(self) -> AbstractAsyncContextManager[None]:
        """They have none."""
        return nullcontext()


class WatchedRounds(Rounds):
    """Rounds whose every commit is seen at the moment that it is made."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state":
            here = this_process()
            here.world.held(here, value)


def watched_rounds(*parts: Any) -> Rounds:
    """`rounds_of_all`, watched unless they only merge what pairs have made."""
    rounds, here = rounds_of_all(*parts), this_process()
    if here.world.config.outer.algorithm != "noloco":
        here.rounds = rounds
        here.world.held(here, rounds.state)
        rounds.__class__ = WatchedRounds
    return rounds


class WatchedPairs(PairRounds):
    """Rounds of pairs that say when they go on from another's state."""

    async def adopt(self, state: OuterState) -> None:
        """See PairRounds."""
        this_process().adopted = True
        await super().adopt(state)


def watched_pairs(*parts: Any) -> PairRounds:
    """`pairs_of_two`, watched."""
    pairs = this_process().pairs = pairs_of_two(*parts)
    pairs.__class__ = WatchedPairs
    return pairs


def beginning(_config: RunConfig, layout: Layout, node: str, _weights: Any = None) -> Checkpoint:
    """Round 0, of weights that are zero."""
    tensors = {ANCHOR: SharedVector(layout.length), MOMENTUM: SharedVector(layout.length)}
    return Checkpoint(OuterState(0, (node,), tensors, {}))


async def find_run(settings: Settings) -> Membership:
    """What site/join.py finds out: a new site waits for a peer that lets it in."""
    here = this_process()
    record = SiteRecord.load(settings.folder)
    if record is None and settings.peers:
        visitor = HuntCarrier(here.world.network, NODES[here.site], here)
        while True:
            if await _let_in(visitor, settings.peers):
                break
            await asyncio.sleep(1.0)
    return Membership(here.world.config, IDENTITIES[here.site], None, None, record, "grpc")


async def _let_in(visitor: HuntCarrier, peers: tuple[str, ...]) -> bool:
    for peer in peers:
        try:
            await visitor.greet(peer, HelloRequest(protocol=PROTOCOL, site=Site(node=visitor.node)), GREETING)
            return True
        except PeerLost:
            continue
    return False


def make_carrier(_transport: Any, node: str, _run_hash: bytes, *_rest: Any) -> HuntCarrier:
    """This process's end of the wire."""
    here = this_process()
    here.carrier = HuntCarrier(here.world.network, node, here)
    return here.carrier


class _OneLayout:
    @staticmethod
    def of_run(_config: Any) -> Layout:
        return LAYOUT


class _Nothing:
    def __init__(self, *_parts: Any) -> None:
        pass

    async def start(self, _port: int) -> int:
        return 1

    async def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


async def tell_nothing(*_about: Any) -> None:
    """There are no tokens to count."""


DOUBLES: dict[Any, dict[str, Any]] = {
    daemon: {
        "check_port": lambda _settings: None,
        "check_start": lambda _settings: None,
        "find_run": find_run,
        "make_carrier": make_carrier,
        "StatusServer": _Nothing,
        "ProbeServer": _Nothing,
        "claim": _Nothing,
        "require_claimed": lambda *_: None,  # the folder of a process that dies is renamed
        "name_in_logs": lambda _called: None,
    },
    replica: {
        "Replica": HuntReplica,
        "own_trainer": HuntWorkers,
        "tell_start": tell_nothing,
        "get_ready": lambda _config: None,
        "Layout": _OneLayout,
        "rounds_of_all": watched_rounds,
        "pairs_of_two": watched_pairs,
    },
    resume: {"beginning": beginning},
}
"""What these modules of `pier_node.site` find under these names."""
