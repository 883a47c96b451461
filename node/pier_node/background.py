"""Work beside a site's main work, for as long as it lives: an error in it must not be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any


class Background:
    """Tasks that never end by themselves, but with an error."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
        """Go on with some work until the stack is closed."""
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
