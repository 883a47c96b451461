"""A schedule, played: machines, their network, what happens to them, and what must hold whatever happens.

- No round has two digests. What a site holds as committed counts from that moment on, saved or not; only a digest that
  is in no memory and on no disk any more when the round gets another one is not a fork, but undone.
- A site that never went down loses no inner step.
- Once nothing happens any more and everybody runs, all finish, soon.
- Nobody ends with an error, and nobody logs one, but for want of space, or of a committed round that a disk has lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.disk import PowerCut
from simulation.faults import Fault, Schedule
from simulation.keys import NODES
from simulation.machine import Machine
from simulation.network import Network, Weather
from simulation.process import HERE, Process

from pier_node.base.errors import PierError
from pier_node.outer.schedule import entry, total_rounds
from pier_node.outer.state import OuterState

PATIENCE = 900.0
"""Virtual seconds within which all finish once nothing happens to anybody any more."""
STOPS = 60.0
"""Virtual seconds within which a site that is told to stop has stopped."""
FIRST = 300.0
"""Virtual seconds for which faults wait for the round that they come after."""
ARMED = 60.0
"""Virtual seconds for which a site may come to the phase, or the write, at which it is to die."""
LOOK = 5.0
EPOCH = 1.8e9
CALM = Weather()
"""Before the first round, unless faults come earlier, and after the last fault."""


@dataclass
class Commit:
    """A digest that somebody held as the last committed state: who made it, who held it first."""

    members: tuple[str, ...]
    first: str


class World:
    """All of it.

    Attributes:
        failures: what did not hold.
        flaws: what is not as it should be, but breaks no promise.
    """

    def __init__(self, schedule: Schedule, root: Path, say: Callable[[str], None] | None = None) -> None:
        self.schedule, self.config, self._say = schedule, schedule.config, say
        self.names, self.paces, self.latency = schedule.names, schedule.paces, schedule.latency
        self.random = self.dice_of("world")
        self.network = Network(schedule.seed, CALM)
        founder = NODES[schedule.founder]
        peers = {name: () if name == schedule.founder else (founder,) for name in self.names}
        self.machines = {name: Machine(self, name, root, peers[name]) for name in self.names}
        self.clocks: dict[str, float] = defaultdict(float)
        self.failures: list[str] = []
        self.flaws: list[str] = []
        self.commits: dict[int, dict[bytes, Commit]] = defaultdict(dict)
        self.pairs: dict[int, dict[str, set[tuple[str, ...]]]] = defaultdict(lambda: defaultdict(set))
        self._pair_rounds = total_rounds(self.config)
        self._reached: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._phases: list[Fault] = []
        self._writes: dict[str, Fault] = {}
        self._sides: list[Fault] = []

    # --- what machines ask ---------------------------------------------------------------------

    def now(self) -> float:
        """Virtual seconds since the start."""
        return asyncio.get_running_loop().time()

    def clock(self) -> float:
        """The time of day at a site."""
        here = HERE.get()
        return EPOCH + self.now() + (self.clocks[here.site] if here else 0.0)

    def dice_of(self, what: str) -> random.Random:
        """Dice of one's own."""
        return random.Random(f"{self.schedule.seed} {what}")

    # --- what they tell ------------------------------------------------------------------------

    def note(self, site: str, text: str) -> None:
        """For people."""
        if self._say:
            self._say(_named(f"{self.now():8.2f}  {site}: {text}"))

    def failed(self, what: str) -> None:
        """Something did not hold."""
        self.note("!!", what)
        self.failures.append(_named(what))

    def flawed(self, what: str) -> None:
        """Something is not as it should be."""
        self.note("!?", what)
        self.flaws.append(_named(what))

    def held(self, here: Process, state: OuterState) -> None:
        """A site holds this as its last committed state."""
        if here.dead:
            return
        known = self.commits[state.round]
        if state.digest not in known:
            self.note(here.site, f"holds round {state.round} = {state.digest.hex()[:8]} of {', '.join(state.members)}")
            known[state.digest] = Commit(state.members, f"{here.site} ({here.number}.) at {self.now():.2f} s")
            self._reached[state.round].set()
        if len(known) > 1:
            self._judge(state)

    def _judge(self, state: OuterState) -> None:
        """Two digests of a round are a fork, unless nobody has the one any more who might go on from it."""
        told = "; ".join(
            f"{digest.hex()[:8]} of {'+'.join(it.members)}, first held by {it.first}"
            for digest, it in self.commits[state.round].items()
        )
        others = {
            f"{name} has round {other.round}"
            for name, machine in self.machines.items()
            for other in machine.states()
            if other.round > state.round or (other.round == state.round and other.digest != state.digest)
        }
        if others:
            self.failed(f"fork: round {state.round}: {told}; {', '.join(sorted(others))}")
        else:
            self.flawed(f"undone: round {state.round}: {told}")

    def saved(self, here: Process, state: OuterState) -> None:
        """A site in a run of pairs has this on its disk."""
        if here.pairs and state.round <= self._pair_rounds:
            self.pairs[state.round][here.site].add(tuple(node[:2] for node in state.members))

    def reached(self, site: str, round: int, phase: str) -> bool:
        """Whether a site dies at this point."""
        fault = next((it for it in self._phases if (it.site, it.how) == (site, phase) and it.number <= round), None)
        if fault is None:
            return False
        self._phases.remove(fault)
        Context().run(self._boot_later, fault)
        return True

    def cut(self, site: str) -> None:
        """A site died at a write."""
        self._boot_later(self._writes.pop(site))

    def _boot_later(self, fault: Fault) -> None:
        asyncio.get_running_loop().call_later(fault.span, self.machines[fault.site].boot)

    def ended(self, here: Process) -> None:
        """A process ended by itself."""
        error = here.error
        if error is None:
            self.note(here.site, "has ended")
        elif here.disk.was_full and isinstance(error, PierError):
            self.note(here.site, f"has ended, with its disk full: {error}")
        elif here.disk.was_full and isinstance(error, OSError):
            self.flawed(f"traceback: {here.site}: {error!r}{_where(error)}")
        else:
            self.failed(f"error: {here.site}: {error!r}{_where(error)}")

    def logged(self, record: logging.LogRecord) -> None:
        """A line of a log."""
        here = HERE.get()
        if here is not None and here.dead:
            return
        site, text = here.site if here else "??", f"{record.levelname} {record.module}: {record.getMessage()}"
        if record.levelno >= logging.ERROR and not (record.module == "member" and self._has_amnesia(here)):
            self.failed(f"logged: {site}: {text}")
        else:
            self.note(site, text)

    def _has_amnesia(self, here: Process | None) -> bool:
        """Whether a fault took a committed round from this site's disk: it tells its operator so."""
        return bool(here and here.rounds and here.rounds.promises.lost and self.machines[here.site].damaged)

    def unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that nobody caught."""
        error, task = context.get("exception"), context.get("task") or context.get("future")
        here = getattr(task, "here", None) or HERE.get()
        if not isinstance(error, PowerCut) and not (here and here.dead):
            self.failed(f"unhandled: {here.site if here else 'nobody'}: {context['message']}: {error!r}")

    # --- the course of it ----------------------------------------------------------------------

    async def play(self) -> None:
        """All of the schedule, and then until all have finished."""
        loop = asyncio.get_running_loop()
        for machine in self.machines.values():
            loop.call_later(2 * self.random.random(), machine.boot)
        await self._committed(1, self.schedule.calm)
        self.network.weather = self.schedule.weather
        happening = [asyncio.create_task(self._happen(fault)) for fault in self.schedule.faults]
        while not self.failures and not all(work.done() for work in happening):
            await asyncio.wait(happening, timeout=LOOK)
        for work in happening:
            work.cancel()
        if not self.failures:
            await self._finish()
        if not self.failures and self.config.outer.algorithm == "noloco":
            self._check_pairs()
        elif not self.failures:
            self._check_steps()
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
        self.network.severed.clear()
        self.network.partition()
        self.network.weather = CALM
        for machine in self.machines.values():
            machine.fill("")
            machine.order(False)
            if machine.now:
                machine.now.disk.cut_in = 0
        deadline = self.now() + PATIENCE
        while not self.failures and not all(machine.now and machine.now.finished for machine in self.machines.values()):
            for machine in self.machines.values():
                machine.boot()
            if self.now() > deadline and self._only_copy_is_lost():
                self.flawed("only copy: that of a committed state is lost, and its site waits for the operator")
                return
            if self.now() > deadline:
                where = "; ".join(f"{name} {_standing(machine)}" for name, machine in self.machines.items())
                self.failed(f"stuck: not finished {PATIENCE:.0f} s after the last fault: {where}")
            await asyncio.sleep(LOOK)

    def _only_copy_is_lost(self) -> bool:
        """Whether a site has committed what neither its own disk nor anybody else has."""
        rounds = [machine.now.rounds for machine in self.machines.values() if machine.now and machine.now.rounds]
        furthest = max((it.state.round for it in rounds), default=0)
        return any(it.promises.lost and it.promises.now.committed > furthest for it in rounds)

    def _check_steps(self) -> None:
        """Who never went down has all that it has trained. Gradients of a start come too late for the next step.

        In a run that waits for its operator, overlapped steps of the coming round are still under way.
        """
        outer = self.config.outer
        if outer.algorithm == "sync" or outer.start != "none":
            return
        for name, machine in self.machines.items():
            here = machine.now
            if machine.starts > 1 or not (here and here.training and here.trainer and here.rounds):
                continue
            under_way = outer.inner_steps if outer.overlap and not here.finished else 0
            ledger, pending = here.rounds.state.ledger, here.training.snapshot().pending_tokens
            for fragment in range(outer.fragments):
                known = ledger.get(entry(NODES[name], fragment), 0) + (pending[fragment] if pending else 0)
                if not 0 <= here.trainer.steps_done - known <= under_way:
                    self.failed(f"lost: {name} did {here.trainer.steps_done} steps, {known} are in part {fragment}")

    def _check_pairs(self) -> None:
        """Who took a step with a partner has one that took it too, but for a decider, when one of them went down."""
        for number, by_site in self.pairs.items():
            for name, each in by_site.items():
                for members in each:
                    partner = next((node for node in members if node != name), name)
                    known = members in by_site.get(partner, set())
                    excused = min(members) == name and any(self._changed(node) for node in members)
                    if not known and not excused:
                        self.failed(f"half: {name} took round {number} with {partner}, which did not")
        for name, machine in self.machines.items():
            here = machine.now
            if not self._changed(name) and here and here.pairs and here.training and here.trainer:
                pending = here.training.snapshot().pending_tokens
                known_steps = here.pairs.state.ledger.get(NODES[name], 0) + (pending[0] if pending else 0)
                if known_steps != here.trainer.steps_done:
                    self.failed(f"lost: {name} did {here.trainer.steps_done} steps, {known_steps} are in its model")

    def _changed(self, name: str) -> bool:
        """Whether a site is not what it has been from the start: it went down, or on from another's state."""
        machine = self.machines[name]
        return machine.starts > 1 or machine.now is None or machine.now.adopted

    # --- what happens --------------------------------------------------------------------------

    async def _happen(self, fault: Fault) -> None:
        if fault.since:
            await self._committed(fault.since, FIRST)
        await asyncio.sleep(fault.at)
        self.note("##", str(fault))
        await getattr(self, f"_{fault.kind.replace(' ', '_')}")(self.machines[fault.site], fault)

    async def _crash(self, machine: Machine, fault: Fault) -> None:
        if machine.up:
            machine.kill("killed")
            await asyncio.sleep(fault.span)
        machine.boot()

    async def _crash_at_phase(self, _machine: Machine, fault: Fault) -> None:
        self._phases.append(fault)
        await asyncio.sleep(ARMED)
        if fault in self._phases:
            self._phases.remove(fault)

    async def _crash_at_write(self, machine: Machine, fault: Fault) -> None:
        if machine.up and machine.now:
            disk = machine.now.disk
            disk.cut_in, disk.how = fault.number, fault.how
            self._writes[fault.site] = fault
            await asyncio.sleep(ARMED)
            disk.cut_in = 0

    async def _stop(self, machine: Machine, fault: Fault) -> None:
        here, told = machine.now, self.now()
        if here is None or here.dead or here.finished:
            return
        machine.stop()
        while True:
            await asyncio.sleep(0.1)
            if here.dead:
                break
            if self.now() > told + STOPS:
                self.failed(f"error: {machine.site} does not stop")
        await asyncio.sleep(fault.span)
        machine.boot()

    async def _older(self, machine: Machine, fault: Fault) -> None:
        machine.kill("killed")
        await asyncio.sleep(fault.span)
        machine.damage(fault.how)
        machine.boot()

    async def _full(self, machine: Machine, fault: Fault) -> None:
        machine.fill(fault.how)
        await asyncio.sleep(fault.span)
        machine.fill("")
        machine.boot()

    async def _partition(self, _machine: Machine, fault: Fault) -> None:
        self._sides.append(fault)
        self._divide()
        await asyncio.sleep(fault.span)
        self._sides.remove(fault)
        self._divide()

    def _divide(self) -> None:
        """Each partition in force divides what the others leave together."""
        kept = [tuple(name in (it.site, *it.others) for it in self._sides) for name in self.names]
        self.network.partition(
            *(
                {NODES[name] for name, it in zip(self.names, kept, strict=True) if it == side}
                for side in sorted(set(kept))
            )
        )

    async def _sever(self, _machine: Machine, fault: Fault) -> None:
        link = frozenset(NODES[name] for name in (fault.site, *fault.others))
        self.network.severed.add(link)
        await asyncio.sleep(fault.span)
        self.network.severed.discard(link)

    async def _pause(self, machine: Machine, fault: Fault) -> None:
        machine.order(True)
        await asyncio.sleep(fault.span)
        machine.order(False)

    async def _clock(self, machine: Machine, _fault: Fault) -> None:
        self.clocks[machine.site] = self.random.uniform(-1e7, 1e7)


def _standing(machine: Machine) -> str:
    here = machine.now
    if here is not None and here.pairs:
        return f"{'' if machine.up else 'down '}at {here.pairs.state.round} ({here.pairs.last_error})"
    if here is None or here.rounds is None:
        return "has no rounds"
    rounds = here.rounds
    place = f"{'' if machine.up else 'down '}at {rounds.state.round} of {'+'.join(rounds.state.members)}"
    return f"{place} with votes {sorted(rounds.promises.votes)} ({rounds.last_error})"


def _named(text: str) -> str:
    """With names in place of node ids."""
    for name, node in NODES.items():
        text = text.replace(node, name)
    return text


def _where(error: BaseException) -> str:
    """The last places of Pier that an error went through."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if "/pier_node/" in it.filename]
    return " at " + " ".join(f"{Path(it.filename).name}:{it.lineno}" for it in frames[-3:])
