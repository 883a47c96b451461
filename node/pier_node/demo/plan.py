"""The run that the demo trains, and how many inner steps fit into the available time on this machine."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pier_node.config.presets import PRESETS
from pier_node.config.run import InnerSection, ModelSection, RunConfig, load
from pier_node.outer.schedule import total_rounds
from pier_node.trainer import devices
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica


def measure(sites: int, seconds: float = 1.5) -> Pace:
    """Train on noise for `seconds`, as each of `sites` sites will train on text, and return the speed."""
    model, device = ModelSection.model_validate({"preset": PRESET}), devices.pick(0)
    torch.set_num_threads(threads_for(sites))
    config = RunConfig(model=model, inner=InnerSection(batch_size=BATCH))
    replica = Replica(config, device, workers=1)
    replica.load_weights(initial_weights(model, seed=0))
    noise = np.random.default_rng(0).integers(model.vocab_size, size=(BATCH, model.context))
    steps, started = 0, 0.0
    while steps < 2 or time.perf_counter() - started < seconds:
        if steps == 1:  # the first one also allocates
            started = time.perf_counter()
        replica.train(steps, (noise, noise), BATCH).item()
        steps += 1
    speed = (steps - 1) * noise.size / (time.perf_counter() - started)
    return Pace(speed, cores() if device.type == "cpu" else 1)


PRESET = "llama-1m"
BATCH = 4
START_FRACTION = 0.1
FEWEST, MOST = 60, 1000
"""Inner steps of a run that is long enough to be interesting, and of one that need not be longer."""
ROUND_SECONDS = 0.3
"""Seconds of an outer round over loopback, its checkpoint included."""
SLACK = 1.3
"""Factor for validation and everything else that runs on the same cores."""

_RUN = """\
[run]
name = "demo"
sites = {sites}

[model]
preset = "{preset}"

[data]
source = "stdlib"

[inner]
total_steps = {steps}
batch_size = {batch}
lr = 1.5e-3
min_lr = 1.5e-4
warmup_steps = {warmup}
eval_every = {eval_every}
eval_batches = 8

[outer]
algorithm = "{algorithm}"
inner_steps = {inner_steps}
"""


@dataclass(frozen=True)
class Pace:
    """The speed of this machine.

    Attributes:
        tokens_per_second: of one site that trains alone.
        abreast: number of sites that keep this speed when all train.
    """

    tokens_per_second: float
    abreast: int


def write_run(path: Path, sites: int, algorithm: str, steps: int) -> RunConfig:
    """Write the demo's run.toml, and read it as a site does."""
    every = inner_steps(steps)
    rounds = steps if algorithm == "sync" else math.ceil(steps / every)
    often = {"warmup": max(steps // 20, 1), "eval_every": max(rounds // 20, 1), "inner_steps": every}
    path.write_text(_RUN.format(preset=PRESET, batch=BATCH, sites=sites, algorithm=algorithm, steps=steps, **often))
    return load(path)


def inner_steps(steps: int) -> int:
    """H: 20, or less in a run so short that it would have fewer than six rounds."""
    return min(max(steps // 6, 5), 20)


def steps_within(seconds: float, sites: int, algorithm: str, pace: Pace) -> int:
    """Inner steps, in tens, that `sites` sites do in `seconds`: one alone during pier's start, then all in parallel."""
    alone = START_FRACTION if algorithm == "pier" else 0.0
    share = alone + (1 - alone) / min(sites, pace.abreast)
    training = sites * BATCH * PRESETS[PRESET]["context"] * share / pace.tokens_per_second * SLACK
    rounds = ROUND_SECONDS / (1 if algorithm == "sync" else inner_steps(MOST))
    return min(max(int(seconds / (training + rounds)) // 10 * 10, FEWEST), MOST)


def synchronous_bytes(config: RunConfig, parameters: int) -> float:
    """Bytes that each site would send if gradients were averaged at every step: 2 · 4 · P · (n − 1) / n per step.

    This is a ring all-reduce of P fp32 numbers among n sites (Patarasuk and Yuan, JPDC 69, 2009), which is the minimum.
    """
    sites = config.run.sites
    return 2 * 4 * parameters * (sites - 1) / sites * config.inner.total_steps


def rounds_between_validations(config: RunConfig) -> int:
    """Number of outer rounds from one validation to the next."""
    return config.inner.eval_every or total_rounds(config)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(sites: int) -> int:
    """Threads for each of `sites` sites, so that together they use each core once."""
    return max(cores() // sites, 1)
