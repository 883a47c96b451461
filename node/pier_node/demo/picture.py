"""The display of a running demo: a live picture in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pier_node.base.units import amount, count, number
from pier_node.config.run import OuterSection
from pier_node.demo.record import Record, Track

EIGHTHS = " ▁▂▃▄▅▆▇█"


def bars(curve: Sequence[tuple[int, float]], end: int, width: int, height: int) -> list[str]:
    """Lines of text, from the top: one bar for each of `width` parts of the steps 0..end that are done.

    Each bar shows the last value known at its step on a logarithmic scale. The lowest value of all is one eighth of a
    line high.
    """
    if not curve:
        return [""] * height
    columns = curve[-1][0] * (width - 1) // max(end, 1) + 1
    values = [_value_at(curve, column * end / max(width - 1, 1)) for column in range(columns)]
    low, high = min(value for _, value in curve), max(value for _, value in curve)
    scale = (8 * height - 1) / math.log(high / low) if high > low else 0.0
    eighths = [1 + round(math.log(value / low) * scale) for value in values]
    return ["".join(EIGHTHS[min(max(level - 8 * line, 0), 8)] for level in eighths) for line in reversed(range(height))]


def _value_at(curve: Sequence[tuple[int, float]], step: float) -> float:
    known = [value for at, value in curve if at <= step]
    return known[-1] if known else curve[0][1]


WIDTH = 100
CHART_WIDTH, CHART_HEIGHT = 72, 4
WORDS = {"": "starting", "catching up": "fetching state"}
"""Words for phases whose names are not clear by themselves."""


def line(record: Record, seconds: float) -> str:
    """The current state in one line."""
    newest = record.newest
    steps = max((track.status.get("inner_step", 0) for track in record.alive), default=0)
    speed = sum(track.status.get("tokens_per_second", 0.0) for track in record.alive)
    parts = [
        f"[{clock(seconds)}] round {max(newest.round, 0)}/{record.rounds}",
        f"step {steps}/{record.config.inner.total_steps}",
        f"{speed:,.0f} tokens/s",
    ]
    if record.validation:
        parts.append(f"validation loss {record.validation[-1][1]:.3f}")
    parts += [f"{amount(sum(track.bytes_sent for track in record.tracks.values()))} sent", agreement(record).plain]
    return "  ".join(parts)


def picture(record: Record, seconds: float) -> RenderableType:
    """The whole screen."""
    config = record.config
    title = f"[b]Pier[/b]  {count(record.parameters)} parameters, {config.run.sites} sites, {_algorithm(config.outer)}"
    body = Group(_sites(record), Text(), *_losses(record), Text(), agreement(record), _traffic(record))
    foot = f"{clock(seconds)}   Ctrl+C ends everything"
    return Panel(body, title=title, subtitle=foot, width=WIDTH, padding=(1, 1), border_style="cyan")


def _algorithm(outer: OuterSection) -> str:
    every = "at every step" if outer.algorithm == "sync" else f"every {outer.inner_steps} inner steps"
    return f"{outer.algorithm}: a round {every}"


def _sites(record: Record) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("site", no_wrap=True)
    table.add_column("does", no_wrap=True, min_width=15)
    table.add_column("", ratio=1)
    for heading in ("step", "tokens/s", "loss", "sent", "round", "took"):
        table.add_column(heading, justify="right", no_wrap=True)
    for track in record.tracks.values():
        table.add_row(*_row(track, record))
    return table


def _row(track: Track, record: Record) -> list[RenderableType]:
    status, steps = track.status, record.config.inner.total_steps
    done = status.get("inner_step", 0)
    bar = ProgressBar(total=steps, completed=done, complete_style="cyan", finished_style="green")
    row: list[RenderableType] = [Text(track.name, "bold"), phase(track, record), bar, f"{done}/{steps}"]
    if not status:
        return row
    speed, exchange = count(status["tokens_per_second"]), f"{number(status['round_seconds'], 2)} s"
    return [*row, speed, number(status["loss"], 3), amount(status["bytes_sent"]), str(max(track.round, 0)), exchange]


def phase(track: Track, record: Record) -> Text:
    """What a site is doing, in words."""
    if track in record.lost:
        return Text("left" if track.code == 0 else f"DIED, code {track.code}", "bold red")
    if track.code is not None or track.round >= record.rounds:
        return Text("done", "green")
    name = str(track.status.get("phase", ""))
    first = record.newest.event.get("inner_step", 0) < record.start_steps
    if first and name == "training":
        return Text("trains for all", "green")
    if first and name == "catching up":
        return Text("waits for start", "dim")
    return Text(WORDS.get(name, name), "green" if name == "training" else "yellow")


def _losses(record: Record) -> list[RenderableType]:
    curve, steps = record.validation, record.config.inner.total_steps
    if not curve:
        return [Text.assemble(("validation loss  ", "dim"), "not measured yet")]
    values = f"{curve[0][1]:.3f} → {curve[-1][1]:.3f}"
    heading = Text.assemble(("validation loss  ", "dim"), (values, "bold"), " nats a byte")
    rows = bars(curve, steps, CHART_WIDTH, CHART_HEIGHT)
    axis = f"0 {f' step {steps}':─>{CHART_WIDTH - 2}}"
    return [heading, *(Text(row, "cyan") for row in rows), Text(axis, "dim")]


def agreement(record: Record) -> Text:
    """Whether all sites hold the same bits, according to their digests; in pairs, their spread."""
    if record.apart:
        known = "not known yet" if record.spread is None else f"{record.spread:.2e}"
        return Text.assemble(("a model at each site", "green"), f"  spread between them {known}")
    if record.forks:
        return Text(f"DIGESTS DIFFER after rounds {record.forks}", "bold red")
    if not record.compared:
        return Text("digests: nothing to compare yet", "dim")
    rounds = f"{record.compared} round{'s' * (record.compared != 1)} compared, digest {record.digest[:12]}"
    return Text.assemble(("✓ same bits at all sites", "green"), f"  {rounds}")


def _traffic(record: Record) -> Text:
    part = record.newest.event.get("inner_step", 0) / record.config.inner.total_steps
    sent = sum(track.bytes_sent for track in record.tracks.values()) / len(record.tracks)
    gradients = record.synchronous_bytes * part
    text = Text(f"sent by a site: {amount(sent)}; averaging gradients at every step: {amount(gradients)}")
    return text.append(f" ({gradients / sent:.1f}x)") if sent else text


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


LINE_SECONDS = 5.0


class Screen:
    """Displays a demo: redraws the picture in place, or without a terminal prints a line from time to time."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console, self._live = console, live
        self._next = 0.0

    def show(self, record: Record, seconds: float) -> None:
        """Display the state after `seconds`."""
        if self._live:
            self._live.update(picture(record, seconds), refresh=True)
        elif seconds >= self._next:
            self._next = seconds + LINE_SECONDS
            self.tell(line(record, seconds))

    def tell(self, text: str) -> None:
        """Print a message that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=not self._live)


@contextmanager
def screen_on(console: Console) -> Iterator[Screen]:
    """The screen that suits a console."""
    if not console.is_terminal:
        yield Screen(console, None)
        return
    # Without a thread of its own, because the process that draws also starts the sites.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Screen(console, live)
