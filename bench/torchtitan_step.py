"""An inner step of torchtitan 0.2.2: its Llama 3 with a given shape, its optimizer, its trainer. For bench/gpu.py."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from bench.trainer import Turn
from pier_node.config.run import RunConfig
from pier_node.trainer.data.corpus import Windows

ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class _Rows:
    """The rows of a site, as a data loader of torchtitan."""

    def __init__(self, windows: Windows, sequences: int) -> None:
        self._windows, self._sequences = windows, sequences

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        step = 0
        while True:
            inputs, targets = (torch.from_numpy(part) for part in self._windows.batch(step, self._sequences))
            yield {"input": inputs}, targets
            step += 1

    def state_dict(self) -> dict[str, Any]:
        """Nothing: no checkpoint is written."""
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Nothing to load."""


def titans(config: RunConfig, windows: Windows) -> Turn:
    """Its steps, compiled block by block, without activation checkpointing. Raises ImportError: it is not installed."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    its: Any = import_module("torchtitan.config")
    specs: Any = import_module("torchtitan.protocols.train_spec")
    trainer: Any = import_module("torchtitan.train")
    llama: Any = import_module("torchtitan.models.llama3")
    model = config.model
    shape = llama.TransformerModelArgs(
        dim=model.dim,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        vocab_size=model.vocab_size,
        rope_theta=model.rope_theta,
    )
    rows = _Rows(windows, config.inner.batch_size)
    changed = {"build_tokenizer_fn": None, "build_dataloader_fn": lambda **_: rows, "model_args": {"pier": shape}}
    specs.register_train_spec("pier", dataclasses.replace(specs.get_train_spec("llama3"), **changed))
    job = its.JobConfig()
    job.model.name = job.model.flavor = "pier"
    job.training.local_batch_size, job.training.seq_len = config.inner.batch_size, model.context
    job.checkpoint.enable, job.compile.enable = False, True
    job.activation_checkpoint.mode, job.metrics.log_freq = "none", 2**30
    made = trainer.Trainer(job)
    parameters = sum(it.numel() for part in made.model_parts for it in part.parameters())
    print(f"  torchtitan's model has {parameters:,} parameters")
    batches, made.step = made.batch_generator(rows), 2  # it reports its first step

    def turn(first: int, end: int) -> None:
        for _ in range(first, end):
            made.train_step(batches)

    return turn
