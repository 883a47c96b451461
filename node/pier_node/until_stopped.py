"""Serving until somebody stops it: Ctrl+C or SIGTERM ends the work, a second one the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any


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
