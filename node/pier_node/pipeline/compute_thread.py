"""The thread that computes: one thing after the other, and nobody waits for ever for it when the site ends.

Threads of Python's own pools are joined when the process ends: one that hangs in a device's driver would keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = 5.0
"""Seconds for what is being computed when the site ends."""


class ComputeThread(Executor):
    """One thread."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have it done after what was submitted before."""
        future: Future[T] = Future()
        self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End after what was submitted, or was begun; `wait` for that, PATIENCE at most."""
        with suppress(Empty):
            while cancel_futures:
                if task := self._tasks.get_nowait():
                    task[0].cancel()
        self._tasks.put(None)
        if wait:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        while task := self._tasks.get():
            _do(*task)
            del task  # what it held is not kept until there is another one


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
