"""The live view of a site, below its log lines on a terminal: the round, its steps, the loss, the time left, who waits.

It shows what `pier-node status` shows, in two lines. Where output is no terminal there is none, and none while a
program of the site's owner prints there itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pier_node.base.tasks import cancel_and_wait
from pier_node.base.units import count, number, span
from pier_node.site.running import Status

EVERY = 0.5
"""Seconds between two looks."""
LOOKS = 600
"""Looks by whose pace the rest of the run is predicted: five minutes."""
BAR = 24


class LiveView:
    """The view.

    Args:
        status: returns the site's status; None: it has not joined its run yet.
    """

    def __init__(self, console: Console, status: Callable[[], Status | None]) -> None:
        self._status = status
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._seen: deque[tuple[float, int]] = deque(maxlen=LOOKS)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show it; at the end the terminal is as before."""
        self._live.start()
        showing = asyncio.create_task(self._show(), name="live view")
        try:
            yield
        finally:
            await cancel_and_wait(showing)
            self.stop()

    def stop(self) -> None:
        """Take it off the terminal, also where nothing else will be done any more."""
        self._live.stop()

    async def _show(self) -> None:
        while True:
            status = self._status()
            if status is not None:
                self._live.update(self.render(status, time.monotonic()), refresh=True)
            await asyncio.sleep(EVERY)

    def render(self, status: Status, now: float) -> RenderableType:
        """The view of a status, seen at a time in seconds."""
        step, steps = status["inner_step"], status["total_steps"]
        self._seen.append((now, step))
        told = [
            f"{status['phase']}: round {min(status['round'] + 1, status['rounds'])} of {status['rounds']}",
            _within(status),
            f"loss {number(status['loss'], 4)}" if status["loss"] == status["loss"] else "",  # NaN is not itself
            f"{count(status['tokens_per_second'])} tokens/s" if status["tokens_per_second"] else "",
            self._left(steps - step),
        ]
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=steps, completed=step, width=BAR)
        line.add_row(bar, Text(", ".join(filter(None, told)), style="bold", overflow="ellipsis", no_wrap=True))
        return Group(line, Text(_awaited(status), style="yellow", overflow="ellipsis", no_wrap=True))

    def _left(self, left: int) -> str:
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return f"{span((now - began) / (last - first) * left)} left" if last > first and left > 0 else ""


def _within(status: Status) -> str:
    """How far the inner steps of the round are."""
    steps, done = status["round_steps"], status["round_steps_done"]
    return f"step {done} of {steps}" if steps and status["phase"] == "training" else ""


def _awaited(status: Status) -> str:
    """Whom this site waits for: what its round or its start says, or the sites that still train."""
    if status["phase"] not in ("waiting", "catching up"):
        return ""
    if status["message"]:
        return f"waits: {status['message']}"
    trains = [it["name"] or it["node"] for it in status["peers"] if it["alive"] and it["phase"] == "training"]
    return f"waits for {', '.join(trains)}" if trains and status["phase"] == "waiting" else ""
