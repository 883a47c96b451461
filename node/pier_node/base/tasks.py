"""Asyncio helpers: a signal that wakes waiting tasks, background tasks, and running until stopped.

A Signal wakes the tasks that wait now, and remembers nothing. A Hearing is one with errors and patience. Background
runs tasks beside a site's main work and makes sure that no error in them is lost. `until_stopped` serves until Ctrl+C
or SIGTERM ends the work; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any


class Signal:
    """A condition without a lock: change the state and `notify`; `await until(...)` a state that you wait for."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Wake all waiting tasks, in the order in which they came."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, timeout: float | None = None) -> None:
        """Return at the next `notify`, or after `timeout` seconds."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            self._waiting.pop(future, None)

    async def until(self, seen: Callable[[], bool]) -> None:
        """Return once `seen()` holds."""
        while not seen():
            await self.wait()


class Hearing(Signal):
    """What is heard of another process, and waits for it that end: by what was waited for, by an error, or by silence.

    Attributes:
        error: raised to whoever waits, and from then on; None: there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self._heard = 0

    def hear(self) -> None:
        """Something was heard: wake all waiting tasks, whose patience begins again."""
        self._heard += 1
        self.notify()

    async def expect(self, seen: Callable[[], bool], patience: float, silence: Callable[[], Exception]) -> None:
        """Return once `seen()` holds.

        Args:
            patience: seconds without hearing anything.
            silence: makes what is raised after them.
        """
        while not seen():
            if self.error is not None:
                raise self.error
            heard = self._heard
            await self.wait(patience)
            if heard == self._heard:
                raise silence()


class Background:
    """Tasks that end only with an error."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
        """Run some work until the stack is closed."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        stack.callback(task.cancel)

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the main work; an error in the background ends it too, and is raised."""
        main = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait([main, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            main.cancel()
            await asyncio.wait([main])


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Do the work until it ends or is stopped; an error in it is raised."""
    task = asyncio.create_task(work)

    def stop() -> None:
        if task.cancelling():
            os._exit(130)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
