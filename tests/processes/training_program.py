"""A user's training program, for tests: `python training_program.py KIND [WIDTH]`, under torchrun or alone.

KIND says how its ranks share the model: plain, ddp, fsdp, tp or 2x2. It prints the sum of the final weights.
"""

from __future__ import annotations

import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pier


def build(kind: str, width: int) -> nn.Module:
    """The same model at every site, however its ranks share it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 1))
    if kind == "plain":
        return model
    dist.init_process_group("gloo")
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    shape = (2, 2) if kind == "2x2" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    if kind in ("tp", "2x2"):
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind in ("fsdp", "2x2"):
        fully_shard(model, mesh=mesh["data"] if kind == "2x2" else mesh)
    return model


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    kind, width = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10
    model = build(kind, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    patience = float(os.environ.get("PATIENCE_SECONDS", "300"))
    site = pier.join(model, optimizer, step_tokens=64, patience=patience)
    # Ranks that hold parts of one replica must see the same batch.
    generator = torch.Generator().manual_seed(0 if kind == "tp" else int(os.environ.get("RANK", "0")) // 2)
    with site:
        diverges_at = float(os.environ.get("NAN_STEP", "inf"))
        while True:
            if site.step_index >= float(os.environ.get("LEAVE_STEP", "inf")):
                break
            inputs = torch.randn(16, 6, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            if site.step_index >= diverges_at:  # a site that is slow or late leaves steps out
                loss, diverges_at = loss * torch.nan, math.inf
            optimizer.zero_grad()
            loss.backward()
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            optimizer.step()
    if site.finished:
        time.sleep(float(os.environ.get("AFTER_SECONDS", "0")))
        total = sum(float(whole(parameter.detach()).double().sum()) for parameter in model.parameters())
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"RESULT {total:.12f} {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
