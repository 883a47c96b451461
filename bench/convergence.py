"""Methods, codecs and overlap at equal tokens: how close to the loss of synchronous training, at how many bytes?

    python -m bench.convergence run [--table NAME] [--budget MINUTES]     runs missing cells, most valuable first
    python -m bench.convergence cell NAME                                 runs one cell again, to compare it
    python -m bench.convergence show [--table NAME] [--plot FILE.png]     prints tables of the cells that exist

Sites are simulated in one process (bench/simulation.py) on the text of the standard library; all methods see the same
windows. What is compared, and how each method is tuned, is in bench/convergence_grid.py. A cell is a file in
docs/results/convergence, written when it is complete, so `run` can be stopped and started at any time.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.convergence_grid import METHODS, REPORTED, SETTINGS, TABLES, TUNING, Cell, Found, Values, named
from bench.simulation import PairSimulation, ddp_bytes, simulation_of
from pier_node.base import durable
from pier_node.trainer.data.sources import FAMILIES

FOLDER = Path("docs/results/convergence")
CACHE = Path("build/convergence")
"""Tokens of the text."""
BASELINE = "sync"
NAME = 14
"""Pixels that a name in the picture is high."""


def measure(cell: Cell) -> dict[str, Any]:
    """Train one cell."""
    config, setting = cell.config(), SETTINGS[cell.setting]
    simulation = simulation_of(config, CACHE, FAMILIES if setting.domains else (), METHODS[cell.method].landing)
    began = time.process_time()
    curve = simulation.run(setting.eval_steps, lambda _: None)
    return {
        "setting": cell.setting,
        "method": cell.method,
        "values": cell.values,
        "seed": cell.seed,
        "loss": curve[-1].loss,
        "curve": [[point.step, round(point.loss, 5)] for point in curve],
        **({"merged": simulation.merged_loss()} if isinstance(simulation, PairSimulation) else {}),
        "parameters": len(simulation.anchor),
        "sent_bytes": round(simulation.sent),
        "ddp_bytes": round(ddp_bytes(config)),
        "cpu_seconds": round(time.process_time() - began, 1),
        "torch": torch.__version__,
        "code": version(),
    }


def version() -> str:
    """The commit that is checked out; "": there is no git here."""
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


def written(values: Values) -> str:
    """Hyperparameters for people."""
    signs = {"mu": "μ", "eta": "η", "alpha": "α", "beta": "β", "gamma": "γ"}
    return ", ".join(f"{signs.get(key, key)} {value:g}" for key, value in values.items())


def table_of(name: str, found: Found) -> Table:
    """Tuned values and final losses of the methods of a table, against synchronous training with the same seeds."""
    setting, methods = TABLES[name]
    what = SETTINGS[setting]
    rounds = what.total_steps // what.inner_steps
    shown = Table(title=f"{name}: final validation loss, nats a byte; {what.sites} sites, {rounds} rounds ({setting})")
    shown.add_column("method")
    shown.add_column("values")
    for heading in ("seeds", "mean", "std", f"to {BASELINE}", "fewer bytes", "CPU s"):
        shown.add_column(heading, justify="right")
    for method in methods:
        cells, over = measured(found, setting, method), excess(found, setting, method)
        values = written(found.tuned(setting, method))
        if not cells:
            shown.add_row(method, values, "not run", *5 * [""])
            continue
        losses = [cell["loss"] for cell in cells.values()]
        shown.add_row(
            method, values, ", ".join(map(str, cells)), f"{fmean(losses):.4f}",
            f"{stdev(losses):.4f}" if len(losses) > 1 else "", f"{fmean(over):+.2%}" if over else "",
            f"{fewer(next(iter(cells.values()))):.0f}x", f"{fmean(cell['cpu_seconds'] for cell in cells.values()):.0f}",
        )  # fmt: skip
    return shown


def sweep_of(name: str, found: Found) -> Table:
    """All that was tried to tune the methods of a table."""
    setting, methods = TABLES[name]
    where = SETTINGS[setting].tuned_at or setting
    shown = Table(title=f"{name}: how the methods were tuned, final validation loss by seed ({where})")
    shown.add_column("method")
    shown.add_column("values")
    for seed in TUNING:
        shown.add_column(str(seed), justify="right")
    for method in dict.fromkeys(METHODS[method].like or method for method in methods):
        for values in unique(chain(*found.trials(where, method))):
            losses = found.losses(where, method, values, TUNING)
            chosen = " *" if values == found.tuned(where, method) else ""
            if losses:
                shown.add_row(
                    method, written(values) + chosen, *(f"{losses[s]:.4f}" if s in losses else "" for s in TUNING)
                )
    return shown


def unique(values: Iterable[Values]) -> list[Values]:
    """Each once: axes begin at the best of the one before."""
    return list({written(each): each for each in values}.values())


def measured(found: Found, setting: str, method: str) -> dict[int, dict[str, Any]]:
    """Cells by seed with the values that were chosen: of the reported seeds, or of the tuning if there are none yet."""
    values = found.tuned(setting, method)
    for seeds in (REPORTED, TUNING):
        cells = {seed: found.get(Cell(setting, method, values, seed)) for seed in seeds}
        if any(cells.values()):
            return {seed: cell for seed, cell in cells.items() if cell}
    return {}


def excess(found: Found, setting: str, method: str) -> list[float]:
    """By how much the losses are above those of tuned synchronous training with the same seeds, as a fraction."""
    cells = measured(found, setting, method)
    base = found.losses(setting, BASELINE, found.tuned(setting, BASELINE), [*cells])
    return [cell["loss"] / base[seed] - 1 for seed, cell in cells.items() if seed in base]


def fewer(cell: dict[str, Any]) -> float:
    """How many times fewer bytes a site sends than in synchronous training in fp32."""
    return float(cell["ddp_bytes"] / max(cell["sent_bytes"], 1))


def plot(found: Found, setting: str, file: Path) -> None:
    """Loss against bytes: a point a method, with a mark for each seed; a ring if only tuning seeds have been run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), dpi=110)
    points: dict[str, tuple[float, float]] = {}
    for method in METHODS:
        over = [100 * each for each in excess(found, setting, method)]
        if over:
            cells = measured(found, setting, method)
            bytes_less = fewer(next(iter(cells.values())))
            axes.plot([bytes_less] * len(over), over, marker="_", color="gray")
            full = REPORTED[0] in cells
            axes.plot(bytes_less, fmean(over), "o", color="tab:blue", fillstyle="full" if full else "none")
            points[method] = bytes_less, fmean(over)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=5, linscale=3)  # what is far above would leave no room for what matters
    axes.yaxis.set_major_formatter("{x:+.0f}")
    bottom, top = axes.get_ylim()
    axes.set_yticks([-6, -4, -2, -1, 0, 1, 2, 4, 10, 20])
    axes.set_ylim(min(bottom, -2) - 0.5, 1.3 * max(top, 2))
    axes.set_xlim(0.7, 10_000)  # room for the names
    axes.set_xlabel("times fewer bytes sent by a site than in synchronous training in fp32")
    axes.set_ylabel(f"validation loss above tuned {BASELINE}, %")
    axes.set_title(f"Loss against bytes ({setting}: {SETTINGS[setting].sites} sites); rings: tuning has not ended")
    figure.tight_layout()
    lowest: dict[int, float] = {}
    for method, point in sorted(points.items(), key=lambda it: -it[1][1]):
        height, column = axes.transData.transform(point)[1], round(math.log(point[0]))
        place = min(height, lowest.get(column, math.inf) - NAME)  # the names of one column do not overlap
        axes.annotate(method, point, xytext=(8, place - height), textcoords="offset pixels", fontsize=8, va="center")
        lowest[column] = place
    figure.savefig(file, dpi=figure.dpi)


@click.group(help=__doc__)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=FOLDER, help="Where cells are.")
@click.pass_context
def main(context: click.Context, folder: Path) -> None:
    """Cells that exist are what all commands start from."""
    torch.set_num_threads(1)
    context.obj = Found(folder)


tables = click.option("--table", "names", multiple=True, type=click.Choice([*TABLES]), help="Only this table.")


@main.command("run")
@tables
@click.option("--budget", type=float, default=float("inf"), help="Minutes after which no cell is begun.")
@click.option("--list", "only_list", is_flag=True, help="Say what is missing, and run nothing.")
@click.pass_obj
def run(found: Found, names: tuple[str, ...], budget: float, only_list: bool) -> None:
    """Run the missing cells in order of value; the choice of values follows from cells as they come."""
    until = time.monotonic() + 60 * budget
    if only_list:
        for name in dict.fromkeys(cell.name for cell in found.missing(names or [*TABLES])):
            click.echo(name)
        return
    while time.monotonic() < until and (cell := next(found.missing(names or [*TABLES]), None)):
        result = keep(found, cell)
        click.echo(f"{time.strftime('%H:%M:%S')} {cell.name} {result['loss']:.4f} in {result['cpu_seconds']:.0f} s")


def keep(found: Found, cell: Cell) -> dict[str, Any]:
    """Measure a cell and write its file."""
    result = measure(cell)
    found.folder.mkdir(parents=True, exist_ok=True)
    durable.replace(found.folder / f"{cell.name}.json", (json.dumps(result) + "\n").encode())
    return result


@main.command("cell")
@click.argument("name")
@click.pass_obj
def again(found: Found, name: str) -> None:
    """Train one cell again; if it has no file yet, write it."""
    cell = named(name)
    before = found.get(cell)
    result = measure(cell) if before else keep(found, cell)
    told = f"; its file says {before['loss']:.4f}" if before else ""
    click.echo(f"{cell.name}: {result['loss']:.4f}, {fewer(result):.0f}x fewer bytes{told}")


@main.command("show")
@tables
@click.option("--plot", "file", type=click.Path(dir_okay=False, path_type=Path), help="Draw loss against bytes here.")
@click.pass_obj
def show(found: Found, names: tuple[str, ...], file: Path | None) -> None:
    """Print tables, sweeps among them."""
    console = Console(width=None if Console().is_terminal else 140)
    for name in names or TABLES:
        console.print(table_of(name, found), sweep_of(name, found))
    if file:
        plot(found, TABLES[names[0]][0] if names else "short", file)


if __name__ == "__main__":
    main()
