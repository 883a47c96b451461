"""The decoder spread over the workers of a site: FSDP2, tensor parallelism, and both (torchtitan, arXiv 2410.06511).

Importing this loads DTensor, which takes a second, so workers that have the whole model each do without it.

Under tensor parallelism the residual stream and the norms are divided by positions, the matrices by heads and hidden
units, and the embedding and the head by the vocabulary, which also divides the logits and the loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.hub import HubDecoder
from pier_node.trainer.parallel import COPIES, Parallel

_LOSS = loss_parallel()
_LOSS.__enter__()  # for the life of this process: a loss of divided logits is computed by parts of the vocabulary


def spread(
    model: Decoder | HubDecoder, parallel: Parallel, workers: int, device: torch.device, bf16: bool
) -> DeviceMesh:
    """Spread a model of the meta device, in place, where it stays until `to_empty`.

    Args:
        parallel: not ddp, unless all workers compute each matrix together.
        workers: of the site, which have joined.
        device: on which the model will be.
        bf16: compute in bfloat16.

    Returns:
        The mesh of the workers among which the batch is dealt: all of them, or one of each group of `tensor`.
    """
    shares = workers // parallel.tensor
    copies = COPIES if parallel.mode == "hsdp" else 1
    mesh = init_device_mesh(
        device.type, (copies, shares // copies, parallel.tensor), mesh_dim_names=("copies", "shards", "tensor")
    )
    if parallel.tensor > 1 and isinstance(model, Decoder):
        _divide(model, mesh["tensor"])
    if shares > 1:
        _shard(model, mesh["copies", "shards"] if copies > 1 else mesh["shards"], bf16)
    if parallel.tensor > 1 and shares // copies > 1:
        mesh["shards", "tensor"]._flatten()  # the norm of the gradient is summed over both at once, alike at all
    return mesh["copies", "shards"]._flatten("shares")


def _shard(model: Decoder | HubDecoder, mesh: DeviceMesh, bf16: bool) -> None:
    # Inputs are not cast: the angles of rotary positions are fp32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if bf16 else None
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    for block in model.blocks.values():
        shard(block)
    shard(model)


def _divide(model: Decoder, mesh: DeviceMesh) -> None:
    model.sequence_parts = mesh.size()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    if model.config.form == "gpt2":
        plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    if not model.config.tie_embeddings:
        plan["head"] = ColwiseParallel()
    for name in model.blocks:
        plan |= {f"blocks.{name}.{part}": style for part, style in _block_plan(model.config.form == "llama").items()}
    parallelize_module(model, mesh, plan)
    model.norm.register_forward_hook(_gather)


def _block_plan(llama: bool) -> dict[str, ParallelStyle]:
    divided, whole = (Shard(1), None, None), (Replicate(), None, None)  # the other two are rotation and past
    columns = ["attention.query", "attention.key", "attention.value", "mlp.up"]
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=divided, desired_input_layouts=whole),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=divided[:1], desired_input_layouts=whole[:1]),
        **{name: ColwiseParallel() for name in (*columns, *(["mlp.gate"] if llama else []))},
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def _gather(_norm: nn.Module, _inputs: Any, out: DTensor) -> Tensor:
    """Before the head: all positions, which it multiplies by its own part of the vocabulary."""
    return out.redistribute(placements=[Replicate()])
