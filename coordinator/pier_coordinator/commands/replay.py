"""`pier-coordinator replay`: the page of a run that is over."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from rich.console import Console

from pier_coordinator.replay import replay


def run_replay(file: Path, speed: float, port: int) -> None:
    """Show it until Ctrl+C. Raises PierError."""
    asyncio.run(_until_stopped(file, speed, port, Console()))


async def _until_stopped(file: Path, speed: float, port: int, console: Console) -> None:
    def ready(address: str) -> None:
        console.print(f"The page: {address} (Ctrl+C ends it)", highlight=False, soft_wrap=True)

    work = asyncio.create_task(replay(file, speed, port, ready))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    await asyncio.wait([work])
    if not work.cancelled():
        work.result()
