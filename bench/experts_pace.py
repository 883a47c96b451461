"""Is a site done when its plan says so? How long an expert takes besides its training, and what that does to a plan.

    python -m bench.experts_pace [--steps 60] [--domains topics,numbers,concurrency]

The first expert, with half the steps, gives speed and setup time, as the seed model's training and `experts.setup_s`
do for a plan. From these follow the predicted times of all others, which real workers train one after the other, as at
a site. The last one should be done within 10 % of plan, on a machine where nothing else runs: its load is shown.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from pier_node.config.run import RunConfig
from pier_node.engine.messages import Progress
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_held_out
from pier_node.experts.job import ExpertJob
from pier_node.experts.trainer import Parent, Shop, train_expert
from pier_node.trainer.model.initial import initial_weights

WANTED = 0.1


@dataclass(frozen=True)
class Took:
    """Seconds of an expert, from its order to its card, and those of them in which workers trained; CPU seconds."""

    whole: float
    training: float
    processor: float

    @property
    def setup(self) -> float:
        """All the rest."""
        return self.whole - self.training


def job(name: str, steps: int, ffn_dim: int) -> ExpertJob:
    """An expert of a built-in domain."""
    section = DomainSection(name=name)
    fields = {"domain": section, "domain_hash": read_held_out(section).digest, "steps": steps, "ffn_dim": ffn_dim}
    rest = {"number": 0, "size": "M", "seed": 1, "batch_size": 8, "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 5}
    return ExpertJob.model_validate({**fields, **rest})


def trained(wanted: ExpertJob, parent: Parent, shop: Shop) -> Took:
    """Train it, and say what that took."""
    chunks: dict[int, float] = {}
    pieces = [0]

    def told(progress: Progress) -> None:
        if progress.seconds < chunks.get(pieces[-1], 0.0):
            pieces.append(progress.step)
        chunks[pieces[-1]] = progress.seconds

    began, used = time.perf_counter(), _processor()
    asyncio.run(train_expert(wanted, parent, shop, told))
    return Took(time.perf_counter() - began, sum(chunks.values()), _processor() - used)


def _processor() -> float:
    return sum(os.times()[:4])


@click.command(help=__doc__)
@click.option("--steps", type=click.IntRange(20), default=60, show_default=True, help="Of each expert.")
@click.option("--domains", default="topics,numbers,concurrency", show_default=True, help="Built-in ones.")
@click.option("--preset", default="llama-1m", show_default=True, help="Of the seed; M is 1.5 times as wide inside.")
def main(steps: int, domains: str, preset: str) -> None:
    """Train, and compare with what was to be expected."""
    run, names = RunConfig.model_validate({"model": {"preset": preset}}), domains.split(",")
    parent = Parent("ab" * 32, run.model, initial_weights(run.model, 1).numpy())
    wide, load = round(1.5 * run.model.ffn_dim), os.getloadavg()[0]
    table = Table("expert", "steps", "planned, s", "took, s", "off", "training, s", "setup, s", "CPU, s", box=None)
    with tempfile.TemporaryDirectory() as folder:
        shop = Shop(run, Path(folder), workers=1)
        first = trained(job(names[0], steps // 2, wide), parent, shop)
        pace = first.training / (steps // 2)
        table.add_row(names[0], str(steps // 2), "-", *_row(first, first.whole)[1:])
        planned = took = 0.0
        for name in names:
            found = trained(job(name, steps, wide), parent, shop)
            expected = pace * steps + first.setup
            table.add_row(name, str(steps), *_row(found, expected))
            planned, took = planned + expected, took + found.whole
    console, off = Console(), took / planned - 1
    console.print(table, f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    console.print(f"all {planned:.1f} s planned, {took:.1f} s taken: {off:+.1%}, wanted {WANTED:.0%} at most")


def _row(found: Took, expected: float) -> list[str]:
    times = f"{expected:.1f}", f"{found.whole:.1f}", f"{found.whole / expected - 1:+.1%}"
    return [*times, f"{found.training:.1f}", f"{found.setup:.1f}", f"{found.processor:.1f}"]


if __name__ == "__main__":
    main()
