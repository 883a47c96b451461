"""Predicted memory of a worker's device, compared with what PyTorch counts: `python -m bench.device_memory`.

One worker of many trains on tensors without storage (FakeTensor), in a process group whose other members do not exist,
while PyTorch's MemTracker counts. On a CPU, norms keep more for the backward pass than on a GPU, so they are replaced
by a norm that keeps what CUDA's fused norm does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pier_node.base.units import amount
from pier_node.config.run import RunConfig
from pier_node.engine.parameters import Vectors, local
from pier_node.trainer import replica, sharding
from pier_node.trainer.model import decoder
from pier_node.trainer.model.cost import device_bytes
from pier_node.trainer.parallel import Checkpointing, Parallel

CASES = [
    *(Parallel("fsdp", tensor, checkpointing) for tensor in (1, 2) for checkpointing in get_args(Checkpointing)),
    Parallel("hsdp", 1, "full"),
    Parallel("fsdp", 4, "none"),
    Parallel("ddp", 8, "none"),
    Parallel("ddp", 8, "full"),
]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _norm(module: torch.nn.RMSNorm, x: Tensor) -> Any:
    if not isinstance(x, DTensor):
        return _Norm.apply(x, module.weight)  # type: ignore[no-untyped-call]
    assert isinstance(module.weight, DTensor)
    normed = _Norm.apply(x.to_local(), module.weight.to_local())  # type: ignore[no-untyped-call]
    return DTensor.from_local(normed, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


@contextmanager
def _alone_among(workers: int) -> Iterator[None]:
    spread = sharding.spread

    def really(function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            with unset_fake_temporarily():  # meshes are made of tensors with contents
                return function(*given, **named)

        return call

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        with (
            patch.object(sharding, "spread", really(spread)),
            patch.object(replica, "Vectors", really(Vectors)),
            patch.object(decoder.RMSNorm, "forward", _norm),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield
    finally:
        dist.destroy_process_group()


def counted(config: RunConfig, parallel: Parallel, workers: int) -> int:
    """Peak bytes of a worker that has AdamW's moments, in the gradient of a step, as PyTorch counts them."""
    inner = config.inner
    with _alone_among(workers):
        worker = replica.Replica(config, torch.device("cpu"), workers, parallel)
        rows = inner.micro_batch or inner.batch_size // worker.shares.count
        tokens = torch.zeros(rows, config.model.context, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(worker._model)
        with tracker:
            moments = [torch.zeros_like(local(it.detach())) for it in worker._model.parameters() for _ in range(2)]
            replica.mean_gradient(worker._trained, tokens, tokens, inner.batch_size, inner, True, worker.shares)
        del moments
        return max(int(sizes["Total"]) for sizes in tracker.get_tracker_snapshot("peak").values())


def case(preset: str, layers: int, workers: int) -> RunConfig:
    """A run of a preset with that many blocks, in bf16, of which each worker computes one row at a time."""
    inner = {"batch_size": workers, "micro_batch": 1, "precision": "bf16"}
    return RunConfig.model_validate({"model": {"preset": preset, "layers": layers}, "inner": inner})


def main() -> None:
    """Print a line for each way of sharing llama-7b among eight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama-7b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--workers", type=int, default=8)
    chosen = parser.parse_args()
    for parallel in CASES:
        config = case(chosen.preset, chosen.layers, chosen.workers // parallel.tensor)
        counts = counted(config, parallel, chosen.workers)
        predicted = device_bytes(config, parallel, chosen.workers, bf16=True)
        name = f"{parallel.mode}, tensor {parallel.tensor}, checkpointing {parallel.checkpointing}"
        print(f"{name}: counted {amount(counts)}, predicted {amount(predicted)}: {predicted / counts:.3f}", flush=True)


if __name__ == "__main__":
    main()
