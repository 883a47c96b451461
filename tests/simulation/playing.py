"""Plays a schedule: the loop, the doubles and the disks that a world needs around it."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from simulation.disk import Disk, PowerCut, under
from simulation.doubles import DOUBLES
from simulation.faults import Schedule
from simulation.process import HERE, make_task
from simulation.virtual_time import VirtualTimeLoop
from simulation.world import World

from pier_node.config.run import RunConfig
from pier_node.outer.advance import get_ready
from pier_node.outer.schedule import synced
from pier_node.rounds import exchange_plan
from pier_node.site import membership, training

T = TypeVar("T")
MEMORY = Path("/dev/shm")


def played(schedule: Schedule, say: Callable[[str], None] | None = None) -> World:
    """The world after all of it has happened.

    Args:
        say: told everything.
    """
    root = Path(tempfile.mkdtemp(prefix="pier-hunt-", dir=MEMORY if MEMORY.is_dir() else None))
    world = World(schedule, root, say)

    def loop() -> HuntLoop:
        made = HuntLoop(world)
        made.set_task_factory(make_task)
        made.set_exception_handler(world.unhandled)
        return made

    if not gc.get_freeze_count():
        get_ready(world.config)  # sites do not: it freezes what is there, and the world would stay for good
    gc.collect()
    gc.disable()  # what a world leaves behind goes at once, between two worlds
    try:
        with _doubled(world, logging.INFO if say else logging.ERROR), asyncio.Runner(loop_factory=loop) as runner:
            runner.run(world.play())
            gc.collect()  # exceptions that nobody has fetched are told
    finally:
        gc.enable()
        shutil.rmtree(root, ignore_errors=True)
    return world


class HuntLoop(VirtualTimeLoop):
    """Virtual time, in which threads take a while."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._latency, self._dice = world.latency, world.dice_of("threads")

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """What has begun is done even if nobody waits for it any more, unless its process is dead."""
        future: asyncio.Future[T] = self.create_future()
        here = HERE.get()

        def work() -> None:
            try:
                if here is not None and here.dead:
                    raise PowerCut
                result = func(*args)
            except PowerCut:
                future.cancel()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        if self._latency:
            self.call_later(self._latency * self._dice.random(), work)
        else:
            work()
        return future


class _Told(logging.Handler):
    def __init__(self, world: World, level: int) -> None:
        super().__init__(level)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.logged(record)


@contextmanager
def _doubled(world: World, level: int) -> Iterator[None]:
    """Have the code under test find doubles, and tell its log to the world."""
    dice, canonical, lengths = world.dice_of("nonces"), world.config.canonical(), dict[int, int]()

    def synced_once(config: RunConfig, number: int, length: int) -> int:
        if number not in lengths:
            lengths[number] = synced(config, number, length)
        return lengths[number]

    def disk() -> Disk | None:
        here = HERE.get()
        return here.disk if here else None

    root, handler = logging.getLogger(), _Told(world, level)
    before = root.level, root.handlers
    with ExitStack() as stack:
        for module, doubles in DOUBLES.items():
            for name, double in doubles.items():
                stack.enter_context(patch.object(module, name, double))
        stack.enter_context(patch.object(training, "LARGE", 0 if world.schedule.large else training.LARGE))
        one_level = 2 if world.schedule.grid else exchange_plan.ONE_LEVEL
        stack.enter_context(patch.object(exchange_plan, "ONE_LEVEL", one_level))
        stack.enter_context(patch.object(secrets, "token_bytes", lambda count=32: dice.randbytes(count)))
        stack.enter_context(patch.object(time, "time", world.clock))
        stack.enter_context(patch.object(RunConfig, "canonical", lambda _config: canonical))
        stack.enter_context(patch.object(membership, "synced", synced_once))
        stack.enter_context(under(disk))
        root.handlers = [handler]
        root.setLevel(level)
        try:
            yield
        finally:
            root.handlers = before[1]
            root.setLevel(before[0])
