"""The model on one worker's device: its gradients, its AdamW, and copies to and from vectors in host memory.

Copies go parameter by parameter, so that the device never holds more than during an inner step (Pier's memory-aware
outer update, arXiv 2511.17849).

The gradient of an inner step uses micro-batches within a worker and an all-reduce between the workers of a site. The
loss is the mean over the site's whole batch, even if the workers' shares are unequal: every token has the weight 1 /
(tokens of the site). So the gradients add up to that of the mean, and no mean of unequal means is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pier_node.config.run import ModelSection, RunConfig
from pier_node.outer.adamw import take_step
from pier_node.outer.layout import Layout
from pier_node.trainer import devices
from pier_node.trainer.data.corpus import Batch
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.evaluate import Losses, row_losses, summed_losses


def mean_gradient(
    model: nn.Module, inputs: Tensor, targets: Tensor, sequences: int, micro_batch: int, bf16: bool
) -> Tensor:
    """Leave the gradient of the site's mean loss in every parameter's `grad`; return that loss, a scalar on the device.

    Args:
        model: the decoder, or DistributedDataParallel around it.
        inputs: this worker's rows, [rows, context] token ids.
        targets: their next tokens, [rows, context].
        sequences: number of rows of the whole site.
        micro_batch: number of rows to compute at once; 0: all.
        bf16: compute under autocast to bfloat16.
    """
    world = dist.get_world_size() if isinstance(model, DistributedDataParallel) else 1
    tokens = sequences * inputs.shape[1]
    model.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=inputs.device)
    size = micro_batch or len(inputs)
    pieces = list(zip(torch.split(inputs, size), torch.split(targets, size)))
    for index, (some_inputs, some_targets) in enumerate(pieces):
        with _reduced(model, index == len(pieces) - 1):
            part = _summed_loss(model, some_inputs, some_targets, bf16) / tokens
            torch.autograd.backward(part * world)  # DistributedDataParallel divides by the number of workers
        loss += part.detach()
    if world > 1:
        dist.all_reduce(loss)
    return loss


def _reduced(model: nn.Module, now: bool) -> AbstractContextManager[None]:
    return nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()


def _summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor, bf16: bool) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=bf16):
        logits = model(inputs)  # [rows, context, vocab]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Replica:
    """One worker's copy of the model. Its weights are undefined until `load_weights`.

    Args:
        config: the run.
        device: the device that holds the model.
        workers: number of replicas in the site; if there are several, the default process group connects them.
    """

    def __init__(self, config: RunConfig, device: torch.device, workers: int) -> None:
        self.layout = Layout.of(config.model)
        self.adam_step = 0
        self.context = config.model.context
        self._inner, self._device = config.inner, device
        self._bf16 = devices.uses_bf16(device, config.inner.precision)
        self._model = _undefined(config.model, self.layout, device)
        self._parameters = dict(self._model.named_parameters())
        if config.inner.compile:
            self._model.compile()
        self._trained = _joined(self._model) if workers > 1 else self._model

    def load_weights(self, flat: Tensor) -> None:
        """Load the weights from a vector, shape [parameters]."""
        self.layout.load(self._model, flat)

    def load_moments(self, first: Tensor, second: Tensor, step: int) -> None:
        """Load AdamW's moments from two vectors, shape [parameters], with `step` steps behind them."""
        self.adam_step = step
        for moment, flat in zip(self._moments, (first, second)):
            for name, view in self.layout.views(flat).items():
                moment[name].copy_(view)

    def store_weights(self, flat: Tensor) -> None:
        """Write the weights to a vector."""
        self.layout.store(self._parameters, flat)

    def store_moments(self, first: Tensor, second: Tensor) -> None:
        """Write AdamW's moments to two vectors."""
        for moment, flat in zip(self._moments, (first, second)):
            self.layout.store(moment, flat)

    def store_gradient(self, flat: Tensor) -> None:
        """Write the gradient of the last call of `gradient` to a vector."""
        gradients = ((name, parameter.grad) for name, parameter in self._parameters.items())
        self.layout.store({name: gradient for name, gradient in gradients if gradient is not None}, flat)

    def gradient(self, rows: Batch, sequences: int) -> Tensor:
        """Compute the gradient of the mean loss over the site's `sequences`; return the loss, on the device.

        Args:
            rows: this worker's part of the site's batch.
            sequences: size of the site's batch.
        """
        inputs, targets = (torch.from_numpy(part).to(self._device) for part in rows)
        return mean_gradient(self._trained, inputs, targets, sequences, self._inner.micro_batch, self._bf16)

    def train(self, step: int, rows: Batch, sequences: int) -> Tensor:
        """Do inner step `step`, counted over the whole run; returns what `gradient` returns."""
        loss = self.gradient(rows, sequences)
        take_step(self._parameters, *self._moments, self.adam_step, step, self._inner)
        self.adam_step += 1
        return loss

    def evaluate(self, flat: Tensor, windows: Iterable[Batch]) -> float:
        """Validation loss of the weights in a vector. They stay loaded: a later job loads its own weights.

        Args:
            windows: this worker's. All of several workers must call this, and get the mean over all windows.
        """
        self.load_weights(flat)
        sums = torch.tensor(summed_losses(self._model, windows, self._bf16), dtype=torch.float64, device=self._device)
        if self._trained is not self._model:
            dist.all_reduce(sums)
        total, count = sums.tolist()
        return float(total / count)

    def rate(self, flat: Tensor, rows: npt.NDArray[np.uint8], at_once: int) -> Losses:
        """Mean loss of each row with the weights in a vector, which stay loaded: see `row_losses`."""
        self.load_weights(flat)
        return row_losses(self._model, rows, at_once, self._bf16)

    @cached_property
    def _moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        # Created when first needed: a worker that only computes gradients has none.
        first, second = ({name: torch.zeros_like(it) for name, it in self._parameters.items()} for _ in range(2))
        return first, second


def _undefined(config: ModelSection, layout: Layout, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    # Not `to_empty`: on the meta device it imports SymPy, which takes a third of a second of every worker's start.
    memory = {entry.name: torch.empty(entry.shape, device=device) for entry in layout.entries}
    model.load_state_dict(memory, assign=True)
    return model


def _joined(model: nn.Module) -> nn.Module:
    # Weights come by load_weights, so there is nothing to broadcast at the start. Gradients are views of the buckets
    # that are sent, so they take memory only once.
    return DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
