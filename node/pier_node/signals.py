"""Something changed: wakes whoever waits now, remembers nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """A condition without a lock: look at the state, and `await until(...)` what you want to see there."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake all who wait."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, timeout: float | None = None) -> None:
        """Return at the next `notify`, or after `timeout` seconds."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            self._waiting.discard(future)

    async def until(self, seen: Callable[[], bool]) -> None:
        """Return once `seen()` holds."""
        while not seen():
            await self.wait()
