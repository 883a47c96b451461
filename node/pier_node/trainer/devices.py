"""The devices of this machine: the number of workers, and how each one computes."""

from __future__ import annotations

import os
import time

import torch

from pier_node.base.errors import PierError


def count() -> int:
    """Default number of workers of a site: one per CUDA device, or one on the CPU."""
    return torch.cuda.device_count() or 1


def memory() -> int:
    """Bytes of the smallest CUDA device; 0: there is none."""
    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return min(sizes, default=0)


def pick(rank: int = 0, workers: int = 1) -> torch.device:
    """The device of worker `rank`. Raises PierError, at each, when there are more workers than CUDA devices."""
    available = torch.cuda.device_count()
    if not available:
        return torch.device("cpu")
    if workers > available:
        raise PierError(
            f"this machine shows {available} CUDA device(s), but each of {workers} workers needs one of its own",
            f"Start the node with --workers {available}, or look at CUDA_VISIBLE_DEVICES.",
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def uses_bf16(device: torch.device, precision: str) -> bool:
    """Whether to compute in bfloat16, according to `inner.precision`; `auto`: if the hardware supports it."""
    if precision != "auto":
        return precision == "bf16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def peak_bytes(device: torch.device) -> int:
    """Peak device memory of this process in bytes; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def copy_rate(device: torch.device) -> float:
    """Bytes per second of a copy from host memory to the device and back, as measured now."""
    host = torch.zeros(1 << 24)
    there = host.to(device, copy=True)
    began = time.perf_counter()
    there.copy_(host)
    host.copy_(there)
    return 2 * host.nbytes / (time.perf_counter() - began)


def share_cores(workers: int) -> None:
    """Give this worker its share of the cores, unless OMP_NUM_THREADS sets the number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
