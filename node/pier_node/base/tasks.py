"""Asyncio helpers: races, work that must not be cut off, signals that wake waiting tasks, and background tasks.

`first_of` waits for the first of several pieces of work and ends the others, `run_to_end` finishes one piece whatever
happens, and `cancel_and_wait` ends tasks. None of them leaves a task behind, loses an error, or swallows a
cancellation from outside.

A Signal wakes the tasks that wait now, and remembers nothing. A Hearing adds errors and patience. Background
runs tasks beside a site's main work and makes sure that no error in them is lost. `when_stopped` says what Ctrl+C,
SIGTERM and a closed terminal do. `until_stopped` serves until one of them ends the work; another ends the process at
once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


async def first_of(*works: Awaitable[T]) -> T:
    """The result of the first work to end; the others are cancelled, and have ended when this returns.

    If several have ended, the one that is named first counts, and errors in the others are logged. An error in the
    first is raised; so is an error with which a cancelled one ends, unless the first has already raised one. A future
    (not a coroutine) is cancelled like a task: give `asyncio.shield(future)` if it must outlive the race.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        for task in tasks:
            if task.done():
                _log_error(task)
        await cancel_and_wait(*tasks)
        raise
    first = next(task for task in tasks if task.done())
    late = [task for task in tasks if not task.done()]
    for task in tasks:
        if task is not first and task.done():
            _log_error(task)
    if first.cancelled() or first.exception():
        await cancel_and_wait(*late)
        return first.result()
    for task in late:
        task.cancel()
    await _all_ended(late)
    for error in map(_error, late):
        if error is not None:
            raise error
    return first.result()


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is finished even if we are cancelled; the cancellation is raised afterwards."""
    task = asyncio.create_task(work)
    try:
        await _all_ended([task])
    except asyncio.CancelledError:
        _log_error(task)
        raise
    return task.result()


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and return once they have ended; errors with which they end are logged."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    try:
        await _all_ended(running)
    finally:
        for task in running:
            _log_error(task)


def unwatched(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose error may go unnoticed, because something else raises it as well."""
    task = asyncio.create_task(work)
    task.add_done_callback(_error)
    return task


async def _all_ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Return once tasks have ended; if we are cancelled meanwhile, raise that only then."""
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _log_error(task: asyncio.Future[Any]) -> None:
    if error := _error(task):
        log.info("no longer needed, and ended with an error: %r", error)


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
    """Signals that another process was heard. A wait ends with what it waits for, with an error, or after silence.

    Attributes:
        error: raised in every wait from now on, if there is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self._heard = 0

    def hear(self) -> None:
        """Note that something was heard: wake all waiting tasks; their patience begins again."""
        self._heard += 1
        self.notify()

    async def expect(self, seen: Callable[[], bool], patience: float, silence: Callable[[], Exception]) -> None:
        """Return once `seen()` holds.

        Args:
            patience: longest silence in seconds.
            silence: makes the exception that is raised after it.
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
        await first_of(*map(asyncio.shield, self._tasks), work)


def when_stopped(stop: Callable[[], None]) -> None:
    """From now on, Ctrl+C and SIGTERM call it in the running loop, and so does a terminal that closes, but only once.

    Where SIGHUP is ignored, as under nohup, the terminal does not matter.
    """
    loop = asyncio.get_running_loop()

    def hang_up() -> None:
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the shell sends a second one
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # each write to a terminal that is gone would fail
                os.dup2(nowhere, descriptor)
        os.close(nowhere)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Do the work until it ends or is stopped; an error in it is raised."""
    task = asyncio.create_task(work)

    def stop() -> None:
        if task.cancelling():
            os._exit(130)
        task.cancel()

    when_stopped(stop)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
