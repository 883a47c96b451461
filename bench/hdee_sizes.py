"""Which size is best for all experts, at equal compute, when they are trained for longer and longer?

    python -m bench.hdee_sizes --cells FOLDER [--times 1] [--seeds 1-3] [--sizes SM]

The three arms differ only in the size of all their experts, S, M or L, and in the number of steps that this size can
have for the FLOPs of M with 300 times `--times` steps. The models are smaller than in bench/hdee.py (0.01 M
parameters), so that they can see many tokens per parameter. The choice of `auto` is based on this: see
docs/results.md.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import torch

from bench.hdee import span
from bench.hdee_report import mixture_of
from bench.hdee_setting import BASE, SIZES, Arms, Setting
from bench.hdee_train import Shop, Texts
from pier_coordinator.experts.difficulty import FLOPS_PER_PARAMETER

SMALL = Setting(dim=16, layers=2, ffn_dim=32, excluded=())


@click.command(help=__doc__)
@click.option("--cells", type=click.Path(file_okay=False, path_type=Path), required=True, help="Keeps what is trained.")
@click.option("--times", type=click.IntRange(1), default=1, show_default=True, help="As many steps as usual.")
@click.option("--seeds", default="1-3", callback=span, show_default=True, help="First and last seed.")
@click.option("--sizes", default=SIZES, show_default=True, help="Sizes to compare.")
def main(cells: Path, times: int, seeds: tuple[int, ...], sizes: str) -> None:
    """Train what is missing, and print bits per byte, the mean of the domains, for each size and seed."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    few, usual, many = (times * steps for steps in SMALL.steps)
    setting = replace(SMALL, steps=(few, usual, many), seeds=seeds)
    arms, texts = Arms(setting), Texts(setting, cells / "cache")
    task, budget = arms.planning.task, arms.plan(BASE).budget
    for name in sizes:
        size = task.sizes[SIZES.index(name)]
        steps = round(budget / len(setting.domains) / (size.flops * task.step_tokens))
        means = []
        for seed in seeds:
            shop = Shop(arms, texts, seed, cells / f"seed-{seed}")
            jobs = [arms.of_size(domain, name, seed).model_copy(update={"steps": steps}) for domain in setting.domains]
            found = mixture_of({job.domain.name: shop.expert(job) for job in jobs})
            means.append(np.mean([rows.mean() for rows in found.values()]))
        seen = steps * task.step_tokens / (size.flops / FLOPS_PER_PARAMETER)
        each = " ".join(f"{mean:.4f}" for mean in means)
        click.echo(f"{name}: {steps} steps, {seen:.1f} tokens per parameter, {np.mean(means):.4f} bits a byte ({each})")


if __name__ == "__main__":
    main()
