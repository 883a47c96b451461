"""Where the demo shows itself: a live screen in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live

from pier_node.demo.picture import line, picture
from pier_node.demo.record import Record

LINE_SECONDS = 5.0


class Screen(Protocol):
    """Shows a demo."""

    def show(self, record: Record, seconds: float) -> None:
        """Show how things are after `seconds`."""

    def tell(self, text: str) -> None:
        """Say something that stays."""


@contextmanager
def screen_on(console: Console) -> Iterator[Screen]:
    """The screen that suits a console."""
    if not console.is_terminal:
        yield LineScreen(console)
        return
    # Without a thread of its own: the process that draws also starts the sites.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveScreen(live)


class LiveScreen:
    """Draws everything anew in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, record: Record, seconds: float) -> None:
        """Draw."""
        self._live.update(picture(record, seconds), refresh=True)

    def tell(self, text: str) -> None:
        """Print above the picture."""
        self._live.console.print(text, markup=False, highlight=False)


class LineScreen:
    """Prints a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def show(self, record: Record, seconds: float) -> None:
        """Print, if it is time."""
        if seconds >= self._next:
            self._next = seconds + LINE_SECONDS
            self.tell(line(record, seconds))

    def tell(self, text: str) -> None:
        """Print."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
