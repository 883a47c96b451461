"""Something changed: wakes whoever waits now, remembers nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """A condition without a lock: look at the state, and `await until(...)` what you want to see there."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Wake all who wait, in the order in which they came."""
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
