"""What share of its time does a site compute, and what does it send, when sites are joined by slow links?

    python -m bench.wan [--quick] [--json FILE] [--plot FILE.png]          (root; Debian: iproute2)

Two sites in network namespaces, joined by a link with a given rate and latency (slow_links.py), run the real loop over
the gRPC carrier with TLS. **Compute is synthetic**: an inner step is a sleep for as long as a step took in the public
measurement that the table compares with (wan_grid.py). Only the journals are written to disk. The first rounds are
left out; utilisation is compute time over wall time at the slower site, Mbit/s the payload that a site sends over wall
time. Last: how much of a link with latency one exchange fills (wan_fill.py).
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.slow_links import has_latency, link, refuse_without_tools
from bench.wan_fill import fill
from bench.wan_grid import LATENCY, METHODS, PUBLIC, RATES, Cell, Task, is_long, reckoned, tasks
from bench.wan_site import Mark
from bench.wan_site import main as main_of_site
from pier_node.base.errors import PierError
from pier_node.identity.node import Identity

PATIENCE = 60.0
"""Seconds that a cell may take beyond three times its rounds on an ideal link."""
NOTE = "compute is synthetic (a sleep); * reckoned from what a longer round took on that link"
QUICK: dict[str, Any] = {"parameters": 2_000_000, "step_seconds": 0.0016, "patience": 0.5}


def measure(task: Task) -> Cell:
    """Run two sites until they have done the rounds of a cell. Raises PierError."""
    warm, rounds = task.rounds()
    needed = warm + rounds + 1
    limit = time.monotonic() + PATIENCE + 3 * needed * task.round_seconds(task.rate)
    with link(task.rate, task.latency) as spaces, tempfile.TemporaryDirectory() as folder:
        for rank in (0, 1):
            (Path(folder) / str(rank)).mkdir()
            Identity.load_or_create(Path(folder) / str(rank))
        with _sites(task, spaces, Path(folder)) as marks:
            found: tuple[list[Mark], list[Mark]] = ([], [])
            while min(len(each) for each in found) < needed:
                try:
                    rank, mark = marks.get(timeout=max(limit - time.monotonic(), 0))
                except queue.Empty as error:
                    raise PierError(f"{task}: not done in time", "Try again when the machine is idle.") from error
                if not isinstance(mark, Mark):
                    raise PierError(f"{task}: site {rank} failed:\n{mark}")
                found[rank].append(mark)
    return cell(task, [each[warm:needed] for each in found])


def cell(task: Task, marks: list[list[Mark]]) -> Cell:
    """What the marks of the sites, first to last, come to; the slower one counts."""
    rounds = len(marks[0]) - 1
    slower = max(marks, key=lambda it: it[-1].at - it[0].at)
    wall = slower[-1].at - slower[0].at
    mbit = 8e-6 * (slower[-1].sent - slower[0].sent) / wall
    return Cell(task, rounds * task.compute / wall, mbit, slower[-1].exchange, rounds)


@contextmanager
def _sites(task: Task, spaces: tuple[str, str], folder: Path) -> Iterator[Any]:
    """Both sites; a queue of what they say. A fork server has everything imported once for all cells."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.wan_site"])
    marks = context.Queue()
    sites = [context.Process(target=main_of_site, args=(rank, task, spaces[rank], folder, marks)) for rank in (0, 1)]
    try:
        for site in sites:
            site.start()
        yield marks
    finally:
        for site in sites:
            site.kill()
            site.join()


def run_grid(wanted: list[Task], console: Console) -> list[Cell]:
    """All cells; of those that take long only the first is measured."""
    cells: list[Cell] = []
    for task in wanted:
        slowest = next((it for it in cells if it.task.rate == task.rate and it.rounds and is_long(it.task)), None)
        if slowest and is_long(task):
            cells.append(reckoned(task, slowest))
        else:
            with console.status(f"{task.method}, H = {task.steps}, {task.rate} Mbit/s"):
                cells.append(measure(task))
        done = cells[-1]
        console.print(f"{task.rate:5} {task.method:22} {task.steps:4} {done.utilisation:7.1%} {done.mbit:8.1f} Mbit/s")
    return cells


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
    size = (5.5 * len(every), 4.6)
    figure, panels = plt.subplots(1, len(every), figsize=size, sharey=True, squeeze=False, layout="constrained")
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
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


@click.command()
@click.option("--quick", is_flag=True, help="2M parameters, one link, H = 128.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw utilisation over bandwidth there.")
def main(quick: bool, json_file: Path | None, plot_file: Path | None) -> None:
    """Measure utilisation over slow links."""
    console = Console()
    try:
        refuse_without_tools()
        latency = LATENCY if has_latency() else 0.0
        if not latency:
            console.print("no /dev/net/tun here (modprobe tun): links have a rate, and no latency")
        wanted = tasks((200,) if quick else RATES, latency)
        if quick:
            wanted = [Task(it.method, it.rate, latency, it.steps, **QUICK) for it in wanted if it.steps != 32]
        cells = run_grid(wanted, console)
        filled = fill(latency, quick)
    except PierError as error:
        raise click.ClickException(str(error)) from error
    for table in [*tables(cells), fill_table(filled)]:
        console.print(table)
    if json_file:
        figures = {"cells": [it.record() for it in cells], "fill": filled, "public": PUBLIC}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if plot_file:
        plot(cells, plot_file)


if __name__ == "__main__":
    main()
