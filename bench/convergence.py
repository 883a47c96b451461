"""Does the loss stay where it should be? Final validation loss of methods, or of codecs and overlap, at equal tokens.

    python -m bench.convergence [--table methods|bandwidth] [--quick] [--json FILE] [--plot FILE.png]

Sites are simulated in one process on the text of the standard library; all methods see the same windows. `start` is a
synchronous start of a tenth of the run, `warmup` the momentum that is gathered in it; pier has both. The gap ratio of
a method is (its loss - sync) / (diloco - sync), of means over seeds: the goal for pier is 0.6.
All of the table `bandwidth` are diloco with such a start; what they lose is measured against `none`.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.pair_simulation import simulation_of
from bench.simulation import Point
from pier_node.config.run import RunConfig

START = {"start": "sync", "start_fraction": 0.1}
Methods = dict[str, dict[str, Any]]
METHODS: Methods = {
    "sync": {"algorithm": "sync", "start": "none"},
    "diloco": {"algorithm": "diloco"},
    "diloco, start": {"algorithm": "diloco", **START},
    "diloco, start, warmup": {"algorithm": "diloco", **START, "momentum_warmup": True},
    "pier, staged": {"algorithm": "pier", **START, "schedule": "staged"},
    "pier, cosine": {"algorithm": "pier", **START, "schedule": "cosine"},
    "noloco": {"algorithm": "noloco"},
    "noloco, start": {"algorithm": "noloco", "start": "solo", "start_fraction": 0.1},
    "noloco, start, γ 0.3": {"algorithm": "noloco", "start": "solo", "start_fraction": 0.1, "noloco": {"gamma": 0.3}},
}
WAYS: Methods = {
    "none": {},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "topk": {"codec": "topk"},
    "topk2": {"codec": "topk2"},
    "overlap": {"overlap": True},
    "4 fragments": {"fragments": 4},
    "int4, overlap": {"codec": "int4", "overlap": True},
    "int4, overlap, 4 fragments": {"codec": "int4", "overlap": True, "fragments": 4},
}
TABLES: dict[str, Methods] = {
    "methods": METHODS,
    "bandwidth": {name: {"algorithm": "diloco", **START, **way} for name, way in WAYS.items()},
}
WANTED = 0.6
"""Property 8: the most that pier's gap to sync may be, as a part of diloco's."""

Curves = dict[str, dict[int, list[Point]]]
"""Method -> seed -> validation losses."""


@dataclass(frozen=True)
class Setting:
    """What all methods have in common."""

    sites: int = 4
    dim: int = 80
    layers: int = 3
    ffn_dim: int = 216
    context: int = 64
    batch_size: int = 4
    total_steps: int = 2000
    inner_steps: int = 20
    lr: float = 2e-3
    warmup_steps: int = 100
    eval_steps: int = 100
    eval_batches: int = 8
    seeds: tuple[int, ...] = (1, 2, 3)

    def config(self, outer: dict[str, Any], seed: int) -> RunConfig:
        """The run of one method with one seed."""
        model = {"dim": self.dim, "layers": self.layers, "heads": 4, "ffn_dim": self.ffn_dim, "context": self.context}
        inner = {key: getattr(self, key) for key in ("batch_size", "total_steps", "lr", "warmup_steps", "eval_batches")}
        tables = {
            "run": {"name": "convergence", "seed": seed, "sites": self.sites},
            "model": {"preset": "llama-1m", **model},
            "inner": {**inner, "min_lr": self.lr / 10, "precision": "fp32"},
            "outer": {"inner_steps": self.inner_steps, **outer},
        }
        return RunConfig.model_validate(tables)


QUICK = Setting(
    dim=32, layers=2, ffn_dim=64, context=32, batch_size=2, total_steps=200, inner_steps=10, warmup_steps=10,
    eval_steps=20, eval_batches=2,
)  # fmt: skip


def measure(methods: Methods, setting: Setting, console: Console) -> Curves:
    """Train with every method and seed, one after the other."""
    curves: Curves = {method: {} for method in methods}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    steps = setting.total_steps * len(methods) * len(setting.seeds)
    with tempfile.TemporaryDirectory() as cache, Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps)
        for seed in setting.seeds:
            for method, outer in methods.items():
                progress.update(bar, description=f"seed {seed}: {method}")
                simulation = simulation_of(setting.config(outer, seed), Path(cache))
                curves[method][seed] = simulation.run(setting.eval_steps, lambda done: progress.advance(bar, done))
                progress.console.print(f"seed {seed}  {method:28}{curves[method][seed][-1].loss:8.4f}")
    return curves


def finals(curves: Curves, method: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Final validation losses, [seeds]."""
    return np.array([points[-1].loss for points in curves[method].values()])


def reference(curves: Curves) -> tuple[str, float]:
    """What all others are compared with: the first method, and its mean loss."""
    first = next(iter(curves))
    return first, float(finals(curves, first).mean())


def gap_ratio(curves: Curves, method: str) -> float:
    """(method - sync) / (diloco - sync), of means over seeds."""
    _, sync = reference(curves)
    return float((finals(curves, method).mean() - sync) / (finals(curves, "diloco").mean() - sync))


def table(curves: Curves, setting: Setting) -> Table:
    """The losses of every method."""
    rounds = setting.total_steps // setting.inner_steps
    title = f"Final validation loss, nats a byte: {setting.sites} sites, {rounds} intervals, {len(setting.seeds)} seeds"
    shown, (first, level) = Table("method", title=title), reference(curves)
    for heading in ("mean", "std", "min", "max", f"to {first}", *(["gap ratio"] if "diloco" in curves else [])):
        shown.add_column(heading, justify="right")
    for method in curves:
        losses = finals(curves, method)
        spread = (losses.mean(), losses.std(ddof=1), losses.min(), losses.max())
        ratio = [f"{gap_ratio(curves, method):.2f}"] if "diloco" in curves else []
        shown.add_row(method, *(f"{value:.4f}" for value in spread), f"{losses.mean() - level:+.4f}", *ratio)
    return shown


def report(curves: Curves, setting: Setting) -> dict[str, Any]:
    """All that was measured, ready for JSON."""
    methods = {
        method: {
            "mean": finals(curves, method).mean(),
            "std": finals(curves, method).std(ddof=1),
            "min": finals(curves, method).min(),
            "max": finals(curves, method).max(),
            "curves": {str(seed): [list(point) for point in points] for seed, points in seeds.items()},
        }
        for method, seeds in curves.items()
    }
    return {"setting": asdict(setting), "torch": torch.__version__, "methods": methods}


def plot(curves: Curves, file: Path) -> None:
    """Validation loss over inner steps: a line for the mean of the seeds, a band from the least to the most."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(13, 5), width_ratios=(1, 1))
    for method, seeds in curves.items():
        steps = [point.step for point in next(iter(seeds.values()))]
        losses = np.array([[point.loss for point in points] for points in seeds.values()])  # [seeds, points]
        for axes in (whole, end):
            axes.plot(steps, losses.mean(axis=0), label=method)
            axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), alpha=0.15)
            axes.set_xlabel("inner step")
    lowest = min(finals(curves, method).min() for method in curves)
    later = [points[len(points) // 2].loss for seeds in curves.values() for points in seeds.values()]
    end.set_xlim(left=steps[len(steps) // 2])
    end.set_ylim(lowest - 0.02, max(later) + 0.02)
    whole.set_ylabel("validation loss, nats a byte")
    whole.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


@click.command(help=__doc__)
@click.option("--table", "what", type=click.Choice([*TABLES]), default="methods", help="What to compare.")
@click.option("--quick", is_flag=True, help="A tiny model and few steps: under a minute, and no evidence.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves here.")
def main(what: str, quick: bool, json_file: Path | None, plot_file: Path | None) -> None:
    """Compare the methods of a table; of `methods`, say whether property 8 holds."""
    torch.set_num_threads(1)
    console, setting = Console(), QUICK if quick else Setting()
    curves = measure(TABLES[what], setting, console)
    console.print(table(curves, setting))
    for method in ("pier, staged", "pier, cosine") if what == "methods" else ():
        ratio = gap_ratio(curves, method)
        console.print(f"{method}: gap ratio {ratio:.2f}, wanted {WANTED} at most: {'yes' if ratio <= WANTED else 'no'}")
    if json_file:
        json_file.write_text(json.dumps(report(curves, setting), indent=1) + "\n")
    if plot_file:
        plot(curves, plot_file)


if __name__ == "__main__":
    main()
