"""The devices of this machine: the number of workers, how each one computes, and how fast it could.

MFU, model FLOPs utilisation, is the part of the devices' peak that the model's own FLOPs take (PaLM, arXiv 2204.02311,
appendix B). Peaks are those of NVIDIA's data sheets: dense matrix products in bfloat16, summed in fp32.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from pier_node.base.errors import PierError
from pier_node.base.units import several
from pier_node.config.run import RunConfig
from pier_node.engine import staging
from pier_node.outer.layout import Layout
from pier_node.trainer.parallel import DDP, Parallel


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


PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""FLOP/s in bfloat16 by a part of the device's name; the first that fits counts."""


def peak_flops(name: str) -> float:
    """Peak FLOP/s of a device in bfloat16; 0: not known."""
    words = name.replace("-", " ").split()
    return next((peak for part, peak in PEAKS.items() if all(word in words for word in part.split())), 0.0)


COMPILED = 10_000_000
"""Parameters of a model that is worth the time that compiling it takes."""


def compiles(device: torch.device, config: RunConfig, parallel: Parallel = DDP) -> bool:
    """Whether to compile the model, according to `inner.compile`; `auto`: Pier's own decoder, where it can and pays.

    transformers' layers know their numbers, so each of them would be compiled by itself. Under tensor parallelism the
    compiler makes wrong gradients of the norms, whose positions are divided (PyTorch 2.13); of selective checkpointing
    it would hide the products that are kept.
    """
    if parallel.tensor > 1 or parallel.checkpointing == "selective":
        return False
    if config.inner.compile != "auto":
        return config.inner.compile
    large = config.model.transformers is None and Layout.of(config.model).length >= COMPILED
    return large and can_compile(device)


def can_compile(device: torch.device) -> bool:
    """Whether this is a GPU and Triton has what it needs: it compiles a module of Python for each kernel."""
    if device.type != "cuda" or not find_spec("triton") or torch.cuda.get_device_capability(device) < (7, 0):
        return False
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header.exists() and any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang", "cc")))


def describe(device: torch.device, workers: int, bf16: bool, compiled: bool = False) -> str:
    """The devices of a site in words, such as "8 x NVIDIA H100 80GB HBM3 (79 GiB each), bf16, compiled"."""
    precision = ("bf16" if bf16 else "fp32") + (", compiled" if compiled else "")
    if device.type != "cuda":
        return f"{workers} x CPU ({several(torch.get_num_threads(), 'thread')} each), {precision}"
    memory = torch.cuda.get_device_properties(device).total_memory
    return f"{workers} x {torch.cuda.get_device_name(device)} ({memory / 2**30:.0f} GiB each), {precision}"


def full_speed(device: torch.device, workers: int, bf16: bool, token: float) -> float:
    """Tokens per second if the devices did nothing but a token's `token` FLOPs, at their peak; 0: not known."""
    if device.type != "cuda" or not bf16:
        return 0.0
    return workers * peak_flops(torch.cuda.get_device_name(device)) / token


DRIVER = Path("/dev/nvidiactl")
"""Is there where NVIDIA's driver runs."""


def fallback(device: torch.device) -> str:
    """Why training on this CPU is probably a mistake; "": there is no sign of a GPU."""
    if device.type != "cpu":
        return ""
    if DRIVER.exists():
        return f"this machine has an NVIDIA GPU, but PyTorch {torch.__version__} does not see it"
    if torch.version.cuda:
        return f"PyTorch is built for CUDA {torch.version.cuda}, but sees no GPU"
    return ""


def copy_rate(device: torch.device) -> float:
    """Bytes per second of weights from the host to the device and back, as measured now."""
    host = torch.zeros(1 << 24)
    pairs = [(host.to(device, copy=True), host)]
    staging.take(pairs)  # which gets its memory now
    began = time.perf_counter()
    staging.take(pairs)
    staging.put(pairs)
    return 2 * host.nbytes / (time.perf_counter() - began)


def share_cores(workers: int) -> None:
    """Give this worker its share of the cores, unless OMP_NUM_THREADS sets the number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
