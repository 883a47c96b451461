"""The tables and the plot of bench/wan.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from bench.wan_grid import METHODS, PUBLIC, Cell

NOTE = "compute is synthetic (a sleep); * reckoned from what a longer round took on that link"


def of(cells: list[Cell], method: str, steps: int) -> list[Cell]:
    """A method's cells, by rate; ddp is the same whatever H."""
    own = [cell for cell in cells if cell.task.method == method and cell.task.steps in (steps, 1)]
    return sorted(own, key=lambda cell: cell.task.rate)


def tables(cells: list[Cell]) -> list[Table]:
    """A table for each H: utilisation and Mbit/s, a column a rate."""
    return [_table(cells, steps) for steps in sorted({cell.task.steps for cell in cells} - {1})]


def _table(cells: list[Cell], steps: int) -> Table:
    latency = 1000 * cells[0].task.latency
    title = f"Compute utilisation, and Mbit/s sent, H = {steps}, {latency:g} ms one way"
    shown = Table("method", title=title, caption=NOTE)
    rates = sorted({cell.task.rate for cell in cells})
    for rate in rates:
        shown.add_column(f"{rate} Mbit/s", justify="right")
    for method in METHODS:
        shown.add_row(method, *(_entry(cell) for cell in of(cells, method, steps)))
    public = PUBLIC[steps]
    shown.add_row("diloco-measured (public)", *(f"{public[rate]:.1%}" if rate in public else "" for rate in rates))
    return shown


def _entry(cell: Cell) -> str:
    return f"{cell.utilisation:.1%}, {cell.mbit:.1f}" + ("" if cell.rounds else " *")


def fill_table(filled: dict[str, Any]) -> Table:
    """How much of a link with latency an exchange fills."""
    title = f"One exchange without a codec, {filled['rate']} Mbit/s, {2000 * filled['latency']:g} ms round trip"
    shown = Table("seconds", "Mbit/s", "share", title=title)
    seconds = ", ".join(f"{each:.2f}" for each in filled["times"])
    shown.add_row(seconds, f"{filled['mbit']:.1f}", f"{filled['share']:.1%}")
    return shown


def plot(cells: list[Cell], file: Path) -> None:
    """Utilisation over bandwidth, a line a method, a panel an H."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = sorted({cell.task.steps for cell in cells} - {1})
    figure, panels = plt.subplots(1, len(every), figsize=(5.5 * len(every), 4.2), sharey=True, squeeze=False)
    for panel, steps in zip(panels[0], every, strict=True):
        for method in METHODS:
            own = of(cells, method, steps)
            panel.plot([it.task.rate for it in own], [100 * it.utilisation for it in own], marker="o", label=method)
        public = PUBLIC[steps]
        values = [100 * value for value in public.values()]
        panel.plot([*public], values, "k--", marker="x", label="diloco-measured (public)")
        panel.set(title=f"H = {steps}", xlabel="link, Mbit/s", xscale="log", ylim=(0, 103))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("compute utilisation, %")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
