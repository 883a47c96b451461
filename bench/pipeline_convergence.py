"""What do skipped stages and coarser activations cost in loss, and what do they gain? Arms at equal tokens; then
stages left out.

    python -m bench.pipeline_convergence [--quick] [--arm ARM] [--folder FOLDER] [--plot FILE.png] [--show]

One model is trained as a pipeline whose microbatches visit all stages, or three quarters, two thirds or half of them,
in order, or with a swap in each path where the planner wants one (arXiv 2502.19913). All see the same windows. Then
stages are left out of each model: any quarter, third or half of them, and the last ones. Other arms send activations
and gradients in fewer bits, train for fewer steps (full pipelines that a skipping run has to beat in the same time, or
with the same work), or have replicas of each stage that meet only every H steps. bench/pipeline_arms.py lists all arms.
A cell, an arm with a seed, is a file in the folder, and is not computed again: the command can be stopped and repeated.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.pipeline_arms import ALL, ARMS, CUTS, EXITS, PLAIN, SITES, USUAL
from bench.pipeline_report import plot, tables, times
from bench.pipeline_simulation import PipelineSimulation
from pier_node.config.run import RunConfig
from pier_node.pipeline.stage import stage_blocks
from pier_node.trainer.model.evaluate import choices, early_exits, omissions

PATHS = Path("docs/results/paths.json")
"""What bench/paths.py has measured."""
WIDTH = 160
"""Columns of the tables, however narrow the terminal."""


@dataclass(frozen=True)
class Setting:
    """What all arms have in common."""

    dim: int = 64
    layers: int = 6
    ffn_dim: int = 172
    context: int = 64
    batch_size: int = 3
    microbatches: int = 10
    total_steps: int = 400
    lr: float = 2e-3
    warmup_steps: int = 20
    eval_steps: int = 50
    eval_batches: int = 8
    plan_seconds: float = 2.0
    seeds: tuple[int, ...] = (1, 2, 3)

    def config(self, pipeline: dict[str, Any], seed: int) -> RunConfig:
        """The run of an arm with a seed."""
        model = {"dim": self.dim, "layers": self.layers, "heads": 4, "ffn_dim": self.ffn_dim, "context": self.context}
        inner = {key: getattr(self, key) for key in ("batch_size", "total_steps", "lr", "warmup_steps", "eval_batches")}
        inner |= {key: value for key, value in pipeline.items() if key in inner}
        model |= pipeline.get("model", {})
        outer = {"outer": pipeline["outer"]} if "outer" in pipeline else {}
        pipeline = {key: value for key, value in pipeline.items() if key not in (*inner, "outer", "model", "full_at")}
        section = {
            "microbatches": self.microbatches,
            "memory": 6,
            "plan_seconds": self.plan_seconds,
            **PLAIN,
            **pipeline,
        }
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": "pipeline", "seed": seed, "sites": 64},
            "model": {"preset": "llama-1m", **model},
            "inner": {**inner, "min_lr": self.lr / 10, "precision": "fp32"},
            "pipeline": section,
            **outer,
        }
        config = RunConfig.model_validate(tables)
        tables["run"]["sites"] = SITES[config.pipeline.stages, config.pipeline.path_length]
        return RunConfig.model_validate(tables)


QUICK = Setting(
    dim=40, ffn_dim=64, context=32, total_steps=40, warmup_steps=4, eval_steps=10, eval_batches=1, plan_seconds=0.01,
    seeds=(1,),
)  # fmt: skip


def cell(setting: Setting, arm: str, seed: int, cache: Path, progress: Progress) -> dict[str, Any]:
    """Train one arm with one seed; what was measured, ready for JSON."""
    config, began = setting.config(ALL[arm], seed), time.process_time()
    bar = progress.add_task(f"seed {seed}: {arm}", total=config.inner.total_steps)
    simulation = PipelineSimulation(config, cache, ALL[arm].get("full_at"))
    curve = simulation.run(setting.eval_steps, lambda done: progress.advance(bar, done))
    progress.remove_task(bar)
    model, layers = simulation.model(), setting.layers
    left_out: dict[str, Any] = {}
    if arm in ARMS:
        left_out = {name: (stages, choices(stages, count)) for name, (stages, count) in CUTS.items()}
        left_out["early exit"] = EXITS, early_exits(EXITS)
    found = {
        name: omissions(model, simulation.validation, stage_blocks(layers, stages), chosen, bf16=False)
        for name, (stages, chosen) in left_out.items()
    }
    return {
        "arm": arm,
        "seed": seed,
        "setting": asdict(setting),
        "torch": torch.__version__,
        "curve": [list(point) for point in curve],
        "visits": {" ".join(map(str, route)): count for route, count in sorted(simulation.visits.items())},
        "omission": {name: [[list(it.stages), it.loss] for it in measured] for name, measured in found.items()},
        "cpu_s": time.process_time() - began,
    }


def measure(setting: Setting, arms: Iterable[str], folder: Path, console: Console) -> None:
    """All cells of these arms that are not in the folder yet, seed by seed."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with tempfile.TemporaryDirectory() as cache, Progress(*columns, console=console) as progress:
        for seed in setting.seeds:
            for arm in arms:
                file = folder / f"{arm.replace(' %', '').replace(',', '').replace(' ', '-')}-{seed}.json"
                if _is_there(file, setting):
                    continue
                found = cell(setting, arm, seed, Path(cache), progress)
                file.write_text(json.dumps(found, indent=1) + "\n")
                console.print(f"seed {seed}  {arm:20}{found['curve'][-1][1]:8.4f}  {found['cpu_s']:.0f} s")


def _is_there(file: Path, setting: Setting) -> bool:
    """Whether a cell was measured already. Raises click.UsageError: it was, in another way."""
    if not file.exists():
        return False
    if json.loads(file.read_text())["setting"] != json.loads(json.dumps(asdict(setting))):
        raise click.UsageError(f"{file} was measured with another setting: name another --folder.")
    return True


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A tiny model and few steps: some minutes, and no evidence.")
@click.option(
    "--arm", "arms", type=click.Choice([*ALL]), multiple=True, help="Only this one. [default: the usual ones]"
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs/results/pipeline_convergence"),
    show_default=True,
    help="Of the cells.",
)
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves here.")
@click.option("--show", is_flag=True, help="Compute nothing: the tables of the cells that are there.")
def main(quick: bool, arms: tuple[str, ...], folder: Path, plot_file: Path | None, show: bool) -> None:
    """Train what is missing, and print the tables."""
    torch.set_num_threads(1)
    console = Console(width=WIDTH)
    folder.mkdir(parents=True, exist_ok=True)
    if not show:
        measure(QUICK if quick else Setting(), arms or USUAL, folder, console)
    cells = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    for shown in tables(cells, times(PATHS)):
        console.print(shown)
    if plot_file:
        plot(cells, plot_file)


if __name__ == "__main__":
    main()
