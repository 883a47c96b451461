"""How fast this machine trains the demo's model: a few steps, timed."""

from __future__ import annotations

import time

import numpy as np
import torch

from pier_node.config import InnerSection, ModelSection, RunConfig
from pier_node.demo.plan import BATCH, PRESET, Pace, cores, threads_for
from pier_node.inner import devices
from pier_node.inner.replica import Replica
from pier_node.model.initial import initial_weights


def measure(sites: int, seconds: float = 1.5) -> Pace:
    """Train on noise for `seconds`, as each of `sites` sites will on text."""
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
