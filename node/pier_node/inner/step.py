"""One inner step's gradient: micro-batches inside a worker, an all-reduce between the workers of a site.

The loss is the mean over the whole site's batch, also when the workers' shares are unequal: every token weighs
1 / (tokens of the site), so that the gradients add up to that of the mean and no mean of unequal means is taken.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def mean_gradient(
    model: nn.Module, inputs: Tensor, targets: Tensor, sequences: int, micro_batch: int, bf16: bool
) -> Tensor:
    """Leave in every parameter's `grad` the gradient of the site's mean loss; return that loss, a scalar on the device.

    Args:
        model: the decoder, or DistributedDataParallel around it.
        inputs: this worker's rows, [rows, context] token ids.
        targets: their next tokens, [rows, context].
        sequences: rows of the whole site.
        micro_batch: rows to compute at once; 0: all.
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
