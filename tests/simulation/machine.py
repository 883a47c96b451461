"""A site of a run in virtual time as a machine has it: the real daemon over real files, killed and started again.

Only what touches a network, a clock or a model is a double: the carrier, the workers, the status page, the search for
the run. All the rest (`pier_node.daemon.Daemon` and what it puts together) is what a user runs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from simulation.cluster import LENGTH, FakeTrainer
from simulation.disk import Disk, PowerCut
from simulation.wire import HuntCarrier

from pier.v1.peer_pb2 import HelloRequest, Site
from pier_node import daemon as wiring
from pier_node.checkpoint import Checkpoint, CheckpointStore
from pier_node.config import RunConfig
from pier_node.daemon import Daemon
from pier_node.faults import Faults
from pier_node.join import GREETING, Membership
from pier_node.kept_state import KeptStates
from pier_node.member import rounds_of_all
from pier_node.model.layout import Layout
from pier_node.orders import Orders
from pier_node.outer.round import Rounds
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.settings import Settings
from pier_node.shared import SharedVector
from pier_node.site import SiteRecord
from pier_node.training import Training
from pier_node.wire.carrier import PROTOCOL, PeerLost

if TYPE_CHECKING:
    from simulation.world import World

HERE: ContextVar[Incarnation | None] = ContextVar("HERE", default=None)
"""Whose process the present code belongs to."""
LAYOUT = Layout.laid([("weights", (LENGTH,))])


class SiteTask(asyncio.Task[Any]):
    """A task that knows whose it is."""

    here: Incarnation | None = None


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Any = None) -> SiteTask:
    """The loop's task factory: what a process starts ends with it."""
    task = SiteTask(coroutine, loop=loop, context=context)
    here = task.here = context.get(HERE) if context is not None else HERE.get()
    if here is not None:
        if here.dead:
            task.cancel()
        else:
            here.tasks[task] = None
            task.add_done_callback(here.forget)
    return task


@dataclass(eq=False)
class Incarnation:
    """One process of a site, from its start to its end."""

    world: World
    site: str
    number: int
    disk: Disk
    dead: bool = False
    stopping: bool = False
    finished: bool = False
    error: BaseException | None = None
    tasks: dict[SiteTask, None] = field(default_factory=dict)
    training: Training | None = None
    rounds: Rounds | None = None
    daemon: Daemon | None = None
    orders: Orders = field(default_factory=Orders)
    carrier: HuntCarrier | None = None
    trainer: HuntWorkers | None = None

    def forget(self, task: asyncio.Task[Any]) -> None:
        """A task has ended."""
        self.tasks.pop(cast(SiteTask, task), None)

    def say(self, text: str) -> None:
        """What a user reads."""
        self.world.note(self.site, text.strip().splitlines()[0])
        if text.startswith("The run is finished"):
            self.finished = True

    def end(self) -> None:
        """The process is gone, and all that it had in memory."""
        self.dead = self.disk.gone = True
        if self.carrier:
            self.carrier.die()
        for task in [*self.tasks]:
            task.cancel()


@dataclass(frozen=True)
class HuntSettings(Settings):
    """Settings with a site's faults in them."""

    strike: Any = None

    @property
    def faults(self) -> Faults:
        """Where the schedule has this site die."""
        return Faults(self.strike)


class HuntDaemon(Daemon):
    """The daemon, with orders of a coordinator that is in this process."""

    def __init__(self, here: Incarnation, settings: Settings) -> None:
        super().__init__(settings, here.say)
        self._here = here

    async def _place(self, stack: Any) -> SiteRecord | None:
        self._coordination = cast(Any, Ordered(self._here.orders))
        return self._member.record

    def _member_of_rounds(self, *parts: Any) -> Training:
        training = self._here.training = super()._member_of_rounds(*parts)
        return training

    def _saved(self, state: OuterState) -> None:
        super()._saved(state)
        self._here.world.saved(self._here, state)


class Ordered:
    """Stands for coordination/coordination.py: only orders."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    async def run(self) -> None:
        """The liaison never ends."""
        await asyncio.Event().wait()

    sample = run

    def committed(self, state: OuterState) -> None:
        """A round is told."""


class HuntWorkers(FakeTrainer):
    """Stands for inner/workers.py."""

    def __init__(
        self, config: RunConfig, node: str, slot: int, data_path: str | None, folder: Path, count: int
    ) -> None:
        here = HERE.get()
        assert here
        world = here.world
        super().__init__(world.names.index(node), world.paces[node], world.dice_of(f"{node} {here.number}"))
        self.adam_step = 0
        self.recover_moments: Callable[[], Any] = lambda: None
        here.trainer = self

    async def start(self) -> None:
        """Workers take a moment to start."""
        await asyncio.sleep(self.pace)

    async def stop(self) -> None:
        """They end at once."""

    async def run(self, *parts: Any, **named: Any) -> Any:
        """See FakeTrainer."""
        report = await super().run(*parts, **named)
        if named.get("payload") == "weights":
            self.adam_step = report.adam_step
        return report

    def moments(self) -> tuple[SharedVector, SharedVector, int] | None:
        """See Workers."""
        return (self.adam_m, self.adam_v, self.adam_step) if self.adam_step else None


class NoStatusPage:
    """Stands for status.py."""

    def __init__(self, _status: Any) -> None:
        pass

    async def start(self, _port: int) -> int:
        return 1

    async def stop(self) -> None:
        pass


class WatchedRounds(Rounds):
    """Rounds whose every commit is seen at the moment that it is made."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state" and (here := HERE.get()) and not here.dead:
            here.world.held(here, value)


def watched_rounds(config: RunConfig, *parts: Any) -> Rounds:
    """`rounds_of_all`, watched unless they are of pairs."""
    rounds, here = rounds_of_all(config, *parts), HERE.get()
    assert here
    if config.outer.algorithm != "noloco":
        here.rounds = rounds
        here.world.held(here, rounds.state)
        rounds.__class__ = WatchedRounds
    return rounds


def beginning(_config: RunConfig, layout: Layout, node: str) -> Checkpoint:
    """Round 0, of weights that are zero."""
    tensors = {ANCHOR: SharedVector(layout.length), MOMENTUM: SharedVector(layout.length)}
    return Checkpoint(OuterState(0, (node,), tensors, {}), None, None, 0, 0, 0, None, ())


async def find_run(settings: Settings) -> Membership:
    """What join.py finds out: a new site waits for a peer that lets it in."""
    here = HERE.get()
    assert here
    record = SiteRecord.load(settings.folder)
    if record is None and settings.peers:
        visitor = HuntCarrier(here.world.network, here.site, here)
        while not await _let_in(visitor, settings.peers):
            await asyncio.sleep(1.0)
    identity: Any = here.world.identity(here.site)
    return Membership(here.world.config, identity, None, None, record, "grpc")


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
    here = HERE.get()
    assert here
    here.carrier = HuntCarrier(here.world.network, node, here)
    return here.carrier


class _OneOf:
    """Stands for the class Layout: there is one model."""

    @staticmethod
    def of(_model: Any) -> Layout:
        return LAYOUT


class NoProbe:
    """Stands for wire/probe.py."""

    def __init__(self, *_parts: Any) -> None:
        pass


class _Lock:
    def close(self) -> None:
        pass


DOUBLES: dict[str, Any] = {
    "find_run": find_run,
    "make_carrier": make_carrier,
    "StatusServer": NoStatusPage,
    "ProbeServer": NoProbe,
    "Workers": HuntWorkers,
    "Layout": _OneOf,
    "beginning": beginning,
    "claim": lambda _folder: _Lock(),
    "name_in_logs": lambda _called: None,
    "rounds_of_all": watched_rounds,
}
"""What the module `pier_node.daemon` finds under these names while a hunt runs."""


class Machine:
    """A site's computer: its disk stays, its processes come and go."""

    def __init__(self, world: World, site: str, root: Path, peers: tuple[str, ...]) -> None:
        self.world, self.site, self._root, self._peers = world, site, root, peers
        self._numbers = itertools.count(1)
        self.folder = root / f"{site}.0"
        self.now: Incarnation | None = None
        self.full: str = ""
        self.paused = False
        self.starts = 0

    @property
    def up(self) -> bool:
        """Whether a process runs."""
        return self.now is not None and not self.now.dead

    def boot(self) -> None:
        """Start the daemon, unless it runs."""
        if self.up:
            return
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        here = self.now = Incarnation(self.world, self.site, next(self._numbers), Disk(self.folder, self.full))
        here.disk.on_cut = lambda: Context().run(self._cut, here)
        if self.paused:
            here.orders.take(here.orders.epoch + 1, True, "replica")
        settings = HuntSettings(self.folder, peers=self._peers, name=self.site, insecure=True, strike=self._strike(here))
        context = copy_context()
        context.run(HERE.set, here)
        self.world.note(self.site, f"starts, for the {here.number}. time")
        asyncio.get_running_loop().create_task(self._live(here, settings), context=context)

    async def _live(self, here: Incarnation, settings: Settings) -> None:
        here.daemon = HuntDaemon(here, settings)
        error: BaseException | None = None
        try:
            await here.daemon.run()
        except PowerCut:
            return
        except asyncio.CancelledError as cancelled:
            if here.dead:
                return
            error = cancelled
        except BaseException as raised:
            if here.dead:
                return
            error = raised
        await asyncio.sleep(self.world.latency)  # a process ends when its threads have
        here.error = error
        Context().run(self._ended, here)

    def _ended(self, here: Incarnation) -> None:
        here.end()
        self._move()
        self.world.ended(self, here)

    def _strike(self, here: Incarnation) -> Any:
        async def strike(round: int, phase: str) -> None:
            if not here.dead and self.world.reached(self.site, round, phase):
                Context().run(self.kill, f"killed when it is {phase} in round {round}")
                raise PowerCut

        return strike

    def kill(self, why: str) -> None:
        """The power goes."""
        if self.up and self.now:
            self.world.note(self.site, why)
            self.now.end()
            self._move()

    def _cut(self, here: Incarnation) -> None:
        """The power goes in the middle of a write; the disk moves on once what it did to that write is done."""
        if not here.dead:
            self.world.note(self.site, f"killed at a write: {here.disk.told}")
            here.end()
            self._move()
            self.world.cut(self.site)

    def _move(self) -> None:
        """What was running keeps the old name of the folder, so that it cannot write into the new one any more."""
        folder = self._root / f"{self.site}.{self.starts}"
        self.folder.rename(folder)
        self.folder = folder

    def fill(self, how: str) -> None:
        """The disk takes nothing more; "" frees it."""
        self.full = how
        if self.up and self.now:
            self.now.disk.full = how
            self.now.disk.was_full |= bool(how)

    def stop(self) -> None:
        """`pier-node stop`."""
        if self.up and self.now and self.now.daemon and not self.now.stopping:
            self.world.note(self.site, "is told to stop")
            self.now.stopping = True
            self.now.daemon.stop()

    def order(self, paused: bool) -> None:
        """The coordinator's order."""
        self.paused = paused
        if self.up and self.now:
            orders = self.now.orders
            orders.take(orders.epoch + 1, paused, "replica")

    def states(self) -> list[OuterState]:
        """What it would go on from: in memory while it runs, and on its disk."""
        folder, run = self.folder, self.world.config.hash()
        live = self.now.rounds.state if self.up and self.now and self.now.rounds else None
        saved = CheckpointStore(folder / "checkpoints", run).newest_state()
        kept = KeptStates(folder / "states", run).after(-1)
        return [state for state in (live, saved, kept) if state is not None]

    def damage(self, how: str) -> None:
        """The newest checkpoint is lost or spoilt while the site is down; it needs another one to go back to."""
        found = sorted((self.folder / "checkpoints").glob("round-" + "[0-9]" * 8))
        if self.up or len(found) < 2:
            return
        self.world.note(self.site, f"{found[-1].name} is {how}")
        if how == "deleted":
            for file in found[-1].iterdir():
                file.unlink()
            found[-1].rmdir()
        else:
            files = sorted(found[-1].iterdir())
            spoilt = files[self.world.random.randrange(len(files))]
            spoilt.write_bytes(spoilt.read_bytes()[: spoilt.stat().st_size // 2])

__all__ = ["DOUBLES", "HERE", "Incarnation", "Machine", "make_task", "replace", "wiring"]
