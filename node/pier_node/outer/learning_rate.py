"""The inner learning rate: a linear warmup, then a cosine decay to its least. Pure."""

from __future__ import annotations

import math

from pier_node.config.run import InnerSection


def learning_rate(step: int, config: InnerSection) -> float:
    """The rate of inner step `step`, counted from 0 over the run: up to lr in warmup_steps, then down to min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1.0 + math.cos(math.pi * min(1.0, done)))
