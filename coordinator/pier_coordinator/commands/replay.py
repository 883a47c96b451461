"""`pier-coordinator replay`: shows the page of a finished run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from pier_coordinator.page.replay import replay
from pier_node.base.tasks import until_stopped


def run_replay(file: Path, speed: float, port: int) -> None:
    """Show the page of an event log until Ctrl+C. Raises PierError."""
    console = Console()

    def ready(address: str) -> None:
        console.print(f"The page: {address} (Ctrl+C ends it)", highlight=False, soft_wrap=True)

    asyncio.run(until_stopped(replay(file, speed, port, ready)))
