"""The inner learning rate: a linear warmup, then a decay to its least. Pure.

cosine: GPT-3, arXiv 2005.14165. wsd: warmup, stable, decay (MiniCPM, arXiv 2404.06395), with a decay of 1 − √x, which
Hägele et al. (arXiv 2405.18392) found the best.
"""

from __future__ import annotations

import math

from pier_node.config.run import InnerSection


def learning_rate(step: int, config: InnerSection) -> float:
    """The rate of inner step `step`, counted from 0 over the run: up to lr in warmup_steps, then down to min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    falls, fall = config.warmup_steps, config.lr - config.min_lr
    if config.schedule == "wsd":
        falls = max(falls, config.total_steps - math.ceil(config.decay_fraction * config.total_steps))
    done = min(1.0, max(0, step - falls) / max(1, config.total_steps - falls))
    if config.schedule == "wsd":
        return config.min_lr + fall * (1.0 - math.sqrt(done))
    return config.min_lr + 0.5 * fall * (1.0 + math.cos(math.pi * done))
