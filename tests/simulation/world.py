"""A schedule, played: machines, their network, what happens to them, and what must hold whatever happens."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import shutil
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from simulation.disk import PowerCut, under
from simulation.faults import Fault, Schedule
from simulation.machine import DOUBLES, HERE, Incarnation, Machine, make_task, wiring
from simulation.network import Network, Weather
from simulation.virtual_time import VirtualTimeLoop

from pier_node import member
from pier_node.config import RunConfig
from pier_node.errors import PierError
from pier_node.outer.fragments import entry
from pier_node.outer.schedule import total_rounds
from pier_node.outer.state import OuterState

T = TypeVar("T")
PATIENCE = 900.0
"""Virtual seconds within which all finish once nothing happens to anybody any more."""
STOPS = 60.0
"""Virtual seconds within which a site that is told to stop has stopped."""
LOOK = 5.0
CALM = Weather()
"""Before the first round, unless faults come earlier, and after the last fault."""


@dataclass
class Commit:
    """A digest that somebody held as the last committed state."""

    members: tuple[str, ...]
    first: str
    saved: set[str] = field(default_factory=set)


class World:
    """All of it. `failures` says what did not hold."""

    def __init__(self, schedule: Schedule, root: Path, say: Callable[[str], None] | None = None) -> None:
        self.schedule, self.config = schedule, schedule.config
        self.names, self.paces, self.latency = schedule.names, schedule.paces, schedule.latency
        self.random = random.Random(f"world {schedule.seed}")
        self.network = Network(schedule.seed, CALM)
        self._say = say
        peers = (schedule.founder,)
        self.machines = {
            name: Machine(self, name, root, () if name == schedule.founder else peers) for name in self.names
        }
        self.failures: list[str] = []
        self.flaws: list[str] = []
        self.commits: dict[int, dict[bytes, Commit]] = defaultdict(dict)
        self._phases: dict[tuple[str, int, str], Fault] = {}
        self._writes: dict[str, Fault] = {}
        self._sides: list[Fault] = []
        self._last = total_rounds(self.config)
        self._reached: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    # --- what machines tell and ask ------------------------------------------------------------

    def now(self) -> float:
        """Virtual seconds since the start."""
        return asyncio.get_running_loop().time()

    def note(self, site: str, text: str) -> None:
        """For people."""
        if self._say:
            self._say(f"{self.now():8.2f}  {site}: {text}")

    def failed(self, what: str) -> None:
        """Something did not hold."""
        self.note("!!", what)
        self.failures.append(what)

    def flawed(self, what: str) -> None:
        """Something is not as it should be, but breaks no promise."""
        self.note("!?", what)
        self.flaws.append(what)

    def dice_of(self, what: str) -> random.Random:
        """Dice of one's own."""
        return random.Random(f"{self.schedule.seed} {what}")

    def identity(self, site: str) -> Any:
        """Who a site is."""
        return SimpleNamespace(node=site)

    def held(self, here: Incarnation, state: OuterState) -> None:
        """A site holds this as its last committed state."""
        where, digest = f"{here.site} ({here.number}.) at {self.now():.2f} s", state.digest
        known = self.commits[state.round]
        if digest not in known:
            self.note(here.site, f"holds round {state.round} = {digest.hex()[:8]} of {', '.join(state.members)}")
            known[digest] = Commit(state.members, where)
            self._reached[state.round].set()
        if len(known) > 1:
            self._judge(state)

    def _judge(self, state: OuterState) -> None:
        """Two digests of a round are a fork, unless nobody has the one any more who might go on from it."""
        known = self.commits[state.round]
        others = [
            f"{name} has round {other.round}"
            for name, machine in self.machines.items()
            for other in machine.states()
            if other.round > state.round or (other.round == state.round and other.digest != state.digest)
        ]
        if others:
            self.failed(f"fork: round {state.round}: {self._told(known)}; {', '.join(others)}")
        else:
            self.flawed(f"undone: round {state.round}: {self._told(known)}")

    def saved(self, here: Incarnation, state: OuterState) -> None:
        """It has this on its disk."""
        commit = self.commits[state.round].get(state.digest)
        if commit:
            commit.saved.add(here.site)

    def _told(self, known: dict[bytes, Commit]) -> str:
        return "; ".join(
            f"{digest.hex()[:8]} of {'+'.join(it.members)}, first held by {it.first}, "
            f"saved by {'+'.join(sorted(it.saved)) or 'nobody'}"
            for digest, it in known.items()
        )

    def reached(self, site: str, round: int, phase: str) -> bool:
        """Whether a site dies at this point."""
        fault = self._phases.get((site, round, phase))
        if fault is None:
            return False
        del self._phases[site, round, phase]
        Context_run(self._start_later, fault)
        return True

    def cut(self, site: str) -> None:
        """A site died at a write."""
        if fault := self._writes.pop(site, None):
            self._start_later(fault)

    def _start_later(self, fault: Fault) -> None:
        asyncio.get_running_loop().call_later(fault.span, self.machines[fault.site].boot)

    def ended(self, machine: Machine, here: Incarnation) -> None:
        """A process ended by itself."""
        if here.error is None:
            self.note(machine.site, "has ended")
            if here.rounds:
                self.saved(here, here.rounds.state)
        elif here.disk.was_full and isinstance(here.error, PierError):
            self.note(machine.site, f"has ended, with its disk full: {here.error}")
        elif here.disk.was_full and isinstance(here.error, OSError):
            self.flawed(f"traceback: {machine.site}: {here.error!r}{_where(here.error)}")
        else:
            self.failed(f"error: {machine.site}: {here.error!r}{_where(here.error)}")

    # --- the course of it ----------------------------------------------------------------------

    async def play(self) -> None:
        """All of the schedule, and then until all have finished."""
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        for machine in self.machines.values():
            asyncio.get_running_loop().call_later(2 * self.random.random(), machine.boot)
        await self._committed(1, self.schedule.calm)
        self.network.weather = self.schedule.weather
        happening = [asyncio.create_task(self._happen(fault)) for fault in self.schedule.faults]
        for work in happening:
            while not work.done() and not self.failures:
                await asyncio.wait([work], timeout=LOOK)
        if not self.failures:
            await self._finish()
        for work in happening:
            work.cancel()
        if not self.failures:
            self._check()
        for machine in self.machines.values():
            if machine.now:
                machine.now.end()

    async def _committed(self, number: int, within: float) -> None:
        """Wait for somebody's commit of a round, but not for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._reached[number].wait()

    async def _finish(self) -> None:
        """Nothing happens any more, and everybody runs."""
        self.note("--", "all faults are over")
        self._phases.clear()
        self._writes.clear()
        self.network.severed.clear()
        self.network.partition()
        self.network.weather = CALM
        for machine in self.machines.values():
            machine.fill("")
            machine.order(False)
            if machine.now:
                machine.now.disk.cut_in = 0
        deadline = self.now() + PATIENCE
        while not self._all_finished() and not self.failures:
            for machine in self.machines.values():
                machine.boot()
            if self.now() > deadline:
                where = ", ".join(f"{name} {self._standing(it)}" for name, it in self.machines.items())
                self.failed(f"stuck: not finished {PATIENCE:.0f} s after the last fault: {where}")
            await asyncio.sleep(LOOK)

    def _all_finished(self) -> bool:
        return all(machine.now and machine.now.finished for machine in self.machines.values())

    def _standing(self, machine: Machine) -> str:
        here = machine.now
        if here is None or here.rounds is None:
            return "has no rounds"
        rounds = here.rounds
        return f"{'' if machine.up else 'down '}at {rounds.state.round} votes {sorted(rounds.votes)} ({rounds.last_error})"

    def _check(self) -> None:
        for name, machine in self.machines.items():
            here = machine.now
            if machine.starts > 1 or here is None or here.training is None or here.trainer is None:
                continue
            outer = self.config.outer
            if here.rounds is None or outer.algorithm == "sync" or outer.start != "none":  # gradients may come too late
                continue
            checkpoint = here.training.snapshot()
            state, pending = here.rounds.state, checkpoint.pending_tokens
            for fragment in range(self.config.outer.fragments):
                got = state.ledger.get(entry(name, fragment), 0) + (pending[fragment] if pending else 0)
                if got != here.trainer.steps_done:
                    self.failed(f"lost: {name} did {here.trainer.steps_done} steps, {got} are in part {fragment}")

    # --- what happens --------------------------------------------------------------------------

    async def _happen(self, fault: Fault) -> None:
        if fault.since:
            await self._committed(fault.since, 300.0)
        await asyncio.sleep(fault.at)
        self.note("##", str(fault))
        machine = self.machines[fault.site]
        await getattr(self, f"_{fault.kind.replace(' ', '_')}")(machine, fault)

    async def _crash(self, machine: Machine, fault: Fault) -> None:
        if machine.up:
            machine.kill("killed")
            await asyncio.sleep(fault.span)
        machine.boot()

    async def _crash_at_phase(self, machine: Machine, fault: Fault) -> None:
        self._phases[fault.site, fault.number, fault.how] = fault
        await asyncio.sleep(60.0)
        self._phases.pop((fault.site, fault.number, fault.how), None)

    async def _crash_at_write(self, machine: Machine, fault: Fault) -> None:
        if machine.up and machine.now:
            here = machine.now
            here.disk.cut_in, here.disk.how = fault.number, fault.how
            self._writes[fault.site] = fault
            await asyncio.sleep(30.0)
            here.disk.cut_in = 0
            self._writes.pop(fault.site, None)

    async def _stop(self, machine: Machine, fault: Fault) -> None:
        here = machine.now
        if not machine.up or here is None or here.finished:
            return
        machine.stop()
        told = self.now()
        while not here.dead:
            await asyncio.sleep(0.1)
            if self.now() > told + STOPS:
                self.failed(f"error: {machine.site} does not stop")
                return
        await asyncio.sleep(fault.span)
        machine.boot()

    async def _older(self, machine: Machine, fault: Fault) -> None:
        if machine.up:
            machine.kill("killed")
        await asyncio.sleep(fault.span)
        machine.damage(fault.how)
        machine.boot()

    async def _full(self, machine: Machine, fault: Fault) -> None:
        machine.fill(fault.how)
        await asyncio.sleep(fault.span)
        machine.fill("")
        machine.boot()

    async def _partition(self, machine: Machine, fault: Fault) -> None:
        self._sides.append(fault)
        self._divide()
        await asyncio.sleep(fault.span)
        self._sides.remove(fault)
        self._divide()

    def _divide(self) -> None:
        """Each partition of those in force divides what the others leave together."""
        kept = [tuple(name in (it.site, *it.others) for it in self._sides) for name in self.names]
        sides = {side: {name for name, its in zip(self.names, kept, strict=True) if its == side} for side in kept}
        self.network.partition(*sides.values())

    async def _sever(self, machine: Machine, fault: Fault) -> None:
        link = frozenset({fault.site, *fault.others})
        self.network.severed.add(link)
        await asyncio.sleep(fault.span)
        self.network.severed.discard(link)

    async def _pause(self, machine: Machine, fault: Fault) -> None:
        machine.order(True)
        await asyncio.sleep(fault.span)
        machine.order(False)

    async def _clock(self, machine: Machine, fault: Fault) -> None:
        """Nothing looks at a clock of the wall but what people read; it jumps all the same."""
        self.clock[machine.site] = self.random.uniform(-1e6, 1e6)

    clock: dict[str, float] = defaultdict(float)

    # --- errors that nobody caught -------------------------------------------------------------

    def _unhandled(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        task = context.get("task") or context.get("future")
        here = getattr(task, "here", None) or HERE.get()
        if isinstance(error, (PowerCut, asyncio.CancelledError)) or (here is not None and here.dead):
            return
        self.failed(f"unhandled: {here.site if here else 'nobody'}: {context.get('message')}: {error!r}")


def _where(error: BaseException) -> str:
    """The last places of Pier that an error went through."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if "/pier_node/" in it.filename]
    return " at " + " ".join(f"{Path(it.filename).name}:{it.lineno}" for it in frames[-3:])


def Context_run(work: Callable[..., T], *parts: Any) -> T:
    """Do it as nobody's process."""
    from contextvars import Context

    return Context().run(work, *parts)


class HuntLoop(VirtualTimeLoop):
    """Virtual time, in which threads take a while."""

    world: World | None = None

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """What has begun is done even if nobody waits for it any more, unless its process is dead."""
        future: asyncio.Future[T] = self.create_future()
        here = HERE.get()

        def work() -> None:
            if here is not None and here.dead:
                future.cancel()
                return
            try:
                result = func(*args)
            except PowerCut:
                future.cancel()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        latency = self.world.latency * self.world.random.random() if self.world else 0.0
        if latency:
            self.call_later(latency, work)
        else:
            work()
        return future


class _Errors(logging.Handler):
    """Every error that a live process logs is a failure; with `verbose` all is told."""

    def __init__(self, world: World, level: int) -> None:
        super().__init__(level)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        here = HERE.get()
        if here is not None and here.dead:
            return
        text = f"{record.levelname} {record.name.rpartition('.')[2]}: {record.getMessage()}"
        if record.levelno >= logging.ERROR and record.name != "asyncio":
            self._world.failed(f"logged: {here.site if here else 'nobody'}: {text}")
        else:
            self._world.note(here.site if here else "??", text)


@contextmanager
def doubled(world: World, verbose: bool) -> Iterator[None]:
    """What the code under test finds instead of the machine."""
    token_bytes, dice, clock = secrets.token_bytes, world.dice_of("nonces"), time.time
    before = {name: getattr(wiring, name) for name in DOUBLES}
    canonical, synced = RunConfig.canonical, member.synced
    written, lengths = canonical(world.config), dict[int, int]()

    def synced_once(config: RunConfig, number: int, length: int) -> int:
        if number not in lengths:
            lengths[number] = synced(config, number, length)
        return lengths[number]
    root, level = logging.getLogger(), logging.getLogger().level
    handler = _Errors(world, logging.INFO if verbose else logging.ERROR)

    def disk() -> Any:
        here = HERE.get()
        return here.disk if here else None

    try:
        secrets.token_bytes = lambda count=32: dice.randbytes(count or 32)
        RunConfig.canonical, member.synced = lambda _config: written, synced_once  # type: ignore[method-assign]
        for name, double in DOUBLES.items():
            setattr(wiring, name, double)
        root.addHandler(handler)
        root.setLevel(handler.level)
        with under(disk):
            yield
    finally:
        secrets.token_bytes, time.time = token_bytes, clock
        RunConfig.canonical, member.synced = canonical, synced  # type: ignore[method-assign]
        for name, original in before.items():
            setattr(wiring, name, original)
        root.removeHandler(handler)
        root.setLevel(level)


def played(schedule: Schedule, say: Callable[[str], None] | None = None) -> World:
    """A world in which all of it has happened."""
    shm = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="pier-hunt-", dir=shm if shm.is_dir() else None))
    world = World(schedule, root, say)

    def loop() -> HuntLoop:
        made = HuntLoop()
        made.world = world
        made.set_task_factory(make_task)
        return made

    gc.disable()  # what a world leaves behind goes at once, between two worlds
    try:
        with doubled(world, verbose=say is not None), asyncio.Runner(loop_factory=loop) as runner:
            runner.run(world.play())
    except RuntimeError as error:
        if "deadlock" not in str(error):
            raise
        world.failures.append(f"stuck: {error}")
    finally:
        gc.enable()
        shutil.rmtree(root, ignore_errors=True)
    return world


__all__ = ["RunConfig", "World", "played"]
