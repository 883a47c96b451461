"""An asyncio event loop whose clock jumps to the next timer: hours pass in milliseconds, alike each time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


TICK = 1e-9
"""Time never stands still: a timer that is nearer than the clock's last digit would be due for ever."""


class _NoSelector(selectors.BaseSelector):
    """Waiting for input means that time passes, because there is no input."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled any more")
        self.now += max(timeout, TICK)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class Hanging(ThreadPoolExecutor):
    """A thread whose next tasks take so many seconds, one after the other; each delay is for one of them."""

    def __init__(self) -> None:
        super().__init__(1)
        self.delays: list[float] = []
        self.busy_until = 0.0

    def over(self, now: float) -> float:
        """When a task is done that is given to it now."""
        took = self.delays.pop(0) if self.delays else 0.0
        self.busy_until = max(now, self.busy_until) + took
        return self.busy_until


class _Place:
    """Where the code that runs now would run, if there were threads."""

    in_a_thread = False


def in_a_thread() -> bool:
    """Whether what runs now would not hold up the event loop."""
    return _Place.in_a_thread


@contextmanager
def elsewhere() -> Iterator[None]:
    """What happens meanwhile happens in a thread, or in another process."""
    before, _Place.in_a_thread = _Place.in_a_thread, True
    try:
        yield
    finally:
        _Place.in_a_thread = before


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop of one deterministic order: no threads, no sockets, no wall clock."""

    def __init__(self) -> None:
        self._clock = _NoSelector()
        super().__init__(self._clock)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Work of other threads is done at once, as if it took no time, but for what `Hanging` says."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                with elsewhere():
                    result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        over = executor.over(self.time()) if isinstance(executor, Hanging) else 0.0
        if over > self.time():
            self.call_at(over, work)
        else:
            work()
        return future

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to completion in virtual time. Raises RuntimeError on a deadlock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
