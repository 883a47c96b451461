from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.engine.machines import peak_bytes
from pier_node.trainer import devices
from pier_node.trainer.parallel import Parallel


def _show(monkeypatch: pytest.MonkeyPatch, cuda_devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda_devices)


def test_a_machine_without_cuda_has_one_worker_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _show(monkeypatch, 0)
    assert devices.count() == 1
    assert devices.pick(3, 4) == torch.device("cpu")
    assert peak_bytes(devices.pick(0, 1)) == 0


def test_each_cuda_device_has_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    _show(monkeypatch, 4)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert devices.count() == 4
    assert devices.pick(2, 4) == torch.device("cuda", 2)
    assert chosen == [torch.device("cuda", 2)]


def test_more_workers_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _show(monkeypatch, 2)
    with pytest.raises(PierError, match="2 CUDA device") as caught:
        devices.pick(0, 3)
    assert "--workers 2" in caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "precision", "able", "expected"),
    [
        ("cpu", "auto", True, False),
        ("cpu", "bf16", False, True),
        ("cuda", "auto", True, True),
        ("cuda", "auto", False, False),
        ("cuda", "fp32", True, False),
    ],
)
def test_precision(monkeypatch: pytest.MonkeyPatch, kind: str, precision: str, able: bool, expected: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able)
    assert devices.uses_bf16(torch.device(kind), precision) is expected


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    devices.share_cores(2)
    assert set_to == []  # OMP_NUM_THREADS is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    for workers in (1, 3, 16):
        devices.share_cores(workers)
    assert set_to == [8, 2, 1]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA RTX A4000", 0.0),
        ("Tesla T4", 0.0),
    ],
)
def test_peaks_are_those_of_known_devices(name: str, peak: float) -> None:
    assert devices.peak_flops(name) == peak


def test_a_gpu_is_described_and_its_full_speed_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100 80GB HBM3")
    memory = SimpleNamespace(total_memory=79 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: memory)
    cuda = torch.device("cuda", 0)
    assert devices.describe(cuda, 8, bf16=True) == "8 x NVIDIA H100 80GB HBM3 (79 GiB each), bf16"
    assert devices.full_speed(cuda, 8, True, 1e9) == pytest.approx(8 * 989e3)
    assert devices.full_speed(cuda, 8, False, 1e9) == 0.0
    assert devices.fallback(cuda) == ""


def test_a_cpu_is_suspicious_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert devices.describe(cpu, 2, bf16=False) == "2 x CPU (1 thread each), fp32"
    assert devices.full_speed(cpu, 1, True, 1e9) == 0.0
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.fallback(cpu) == ""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "built for CUDA 13.0, but sees no GPU" in devices.fallback(cpu)
    (tmp_path / "nvidiactl").touch()
    assert "does not see it" in devices.fallback(cpu)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [(Parallel("fsdp"), True), (Parallel(tensor=2), False), (Parallel(checkpointing="selective"), False)],
)
def test_what_the_compiler_gets_wrong_is_not_compiled(parallel: Parallel, expected: bool) -> None:
    config = RunConfig.model_validate({"inner": {"compile": True}})
    assert devices.compiles(torch.device("cpu"), config, parallel) is expected


@pytest.mark.parametrize(
    ("preset", "able", "expected"), [("llama-1b", True, True), ("llama-1b", False, False), ("llama-1m", True, False)]
)
def test_by_itself_a_large_model_is_compiled_where_it_can_be(
    preset: str, able: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "can_compile", lambda _: able)
    config = RunConfig.model_validate({"model": {"preset": preset}})
    assert devices.compiles(torch.device("cpu"), config) is expected


def test_nothing_is_compiled_for_a_cpu() -> None:
    assert not devices.can_compile(torch.device("cpu"))
