"""What only a GPU can show. Without one everything here is skipped; with one: `scripts/test -m gpu`."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from pipeline import cases
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from pier_node.base.shared import SharedVector
from pier_node.config.run import InnerSection, ModelSection, RunConfig
from pier_node.engine import staging
from pier_node.engine.program import Program
from pier_node.engine.staging import HALF
from pier_node.outer.inner_optimizer import Moments, take_step
from pier_node.pipeline.beginnings import made
from pier_node.pipeline.stage import Stage
from pier_node.trainer import devices
from pier_node.trainer.command import Workers, own_trainer
from pier_node.trainer.data.corpus import SiteData, Windows
from pier_node.trainer.data.prefetch import Prefetch
from pier_node.trainer.model import loss as loss_module
from pier_node.trainer.model.cost import GPU_CHUNK
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.hub import import_weights
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.model.loss import summed_loss
from pier_node.trainer.replica import Replica, mean_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
BATCH = 4
Configure = Callable[..., RunConfig]


@pytest.fixture
def cuda() -> torch.device:
    return devices.pick()


@pytest.fixture
async def trainer(configure: Configure, tmp_path: Path) -> AsyncIterator[Program]:
    """The trainer of a site with one GPU, as its daemon starts it."""
    program = own_trainer(configure(precision="fp32"), "node-a", SiteData(), tmp_path / "node", Workers(1))
    await program.start()
    yield program
    await program.stop()


def test_batches_wait_in_pinned_memory(cuda: torch.device, windows: Windows) -> None:
    for found, expected in zip(Prefetch(windows.batch, cuda).rows(0, BATCH), windows.batch(0, BATCH), strict=True):
        assert found.is_pinned()
        assert found.numpy().tolist() == expected.tolist()


def _trained(config: RunConfig, device: torch.device, weights: SharedVector, windows: Windows, steps: int) -> Replica:
    replica = Replica(config, device, 1)
    replica.load_weights(torch.from_numpy(weights.array))
    for step in range(steps):
        replica.train(step, windows.batch(step, BATCH), BATCH)
    return replica


def _loss(replica: Replica, windows: Windows) -> float:
    flat = torch.empty(replica.layout.length)
    replica.store_weights(flat)
    return replica.evaluate(flat, windows.validation(2, BATCH))


def test_weights_come_and_go_unchanged(cuda: torch.device, config: RunConfig, weights: SharedVector) -> None:
    replica = Replica(config, cuda, 1)
    replica.load_weights(torch.from_numpy(weights.array))
    published = torch.empty(replica.layout.length)
    replica.store_weights(published)
    assert np.array_equal(published.numpy(), weights.array)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_shape_pass_through_pinned_memory(cuda: torch.device, dtype: torch.dtype) -> None:
    """Large ones, of which a row is too large for a half of it, ones with gaps, and empty ones."""
    shapes: list[tuple[int, ...]] = [(3, HALF // 4 + 5), (HALF, 2), (HALF // 2,), (), (0, 4), (7, 11)]
    wide = torch.randn(64, 2 * HALF // 64)
    host = [*(torch.randn(shape).to(dtype).float() for shape in shapes), wide.to(dtype).float()[:, 5:-7]]
    own = [*(torch.zeros(shape, dtype=dtype, device=cuda) for shape in shapes)]
    own.append(torch.zeros(wide.shape, dtype=dtype, device=cuda)[:, 5:-7])
    back = [torch.full_like(it, torch.nan) for it in host]
    staging.take(zip(own, host))
    staging.put(zip(own, back))
    assert all(map(torch.equal, host, back))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_model_of_transformers_trains_on_a_gpu(
    kind: str, cuda: torch.device, config: RunConfig, windows: Windows, tmp_path: Path
) -> None:
    hub_cases = pytest.importorskip("trainer.hub_cases")
    hub_cases.made(kind, tmp_path, vocab_size=256)
    model, flat = import_weights(tmp_path)
    fp32 = config.inner.model_copy(update={"precision": "fp32"})
    run = config.model_copy(update={"model": model.model_copy(update={"context": 16}), "inner": fp32})
    found = []
    for device in (cuda, torch.device("cpu")):
        replica = Replica(run, device, 1)
        replica.load_weights(flat)
        found.append([replica.train(step, windows.batch(step, BATCH), BATCH).item() for step in range(5)])
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def test_a_stage_of_a_pipeline_computes_on_a_gpu(cuda: torch.device) -> None:
    config = cases.config()
    tokens = torch.randint(config.model.vocab_size, (2, 2, config.model.context))
    found = []
    for device in (cuda, torch.device("cpu")):
        first, second = (Stage(config, number, device) for number in range(2))
        for stage in (first, second):
            stage.load(torch.from_numpy(made(config, stage.stage)))
            stage.begin([0])
        out = second.forward(0, first.embed(0, tokens[0]))
        loss, slope = first.loss(0, out, tokens[1])
        found.append([torch.tensor(loss), out.float().cpu(), slope.float().cpu()])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


async def test_a_site_trains_on_its_gpu(
    trainer: Program, configure: Configure, weights: SharedVector, windows: Windows
) -> None:
    assert "CPU" not in trainer.device.words
    config = configure(precision="fp32")
    cpu = _trained(config, torch.device("cpu"), weights, windows, 10)
    done = await trainer.run(0, 10, BATCH, "weights", weights)
    expected = torch.empty(cpu.layout.length)
    cpu.store_weights(expected)
    np.testing.assert_allclose(trainer.outbox.array, expected.numpy(), rtol=0, atol=1e-3)
    assert done.adam_step == 10
    assert trainer.device.peak_bytes > 4 * len(weights.array)


async def test_a_worker_that_is_killed_on_its_gpu_is_started_again(trainer: Program, weights: SharedVector) -> None:
    await trainer.run(0, 2, BATCH, "weights", weights)
    (worker,) = [it for it in psutil.Process().children(recursive=True) if it.name() == "pier-worker"]
    os.kill(worker.pid, signal.SIGKILL)
    again = await trainer.run(2, 2, BATCH, "weights", weights, 2)
    assert again.adam_step == 4


@pytest.fixture
def nccl(cuda: torch.device, tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/group", rank=0, world_size=1, device_id=cuda)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_a_gradient_through_nccl_is_that_of_one_worker(cuda: torch.device) -> None:
    model = Decoder(ModelSection(preset="llama-tiny")).to(cuda)
    inputs, targets = torch.randint(256, (2, BATCH, 64), device=cuda).unbind()
    alone = mean_gradient(model, inputs, targets, BATCH, InnerSection(), bf16=False)
    expected = [parameter.grad for parameter in model.parameters()]
    joined = mean_gradient(DistributedDataParallel(model), inputs, targets, BATCH, InnerSection(), bf16=False)
    torch.testing.assert_close(joined, alone)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_a_compiled_model_trains_like_an_eager_one(
    cuda: torch.device, configure: Configure, weights: SharedVector, windows: Windows
) -> None:
    eager, compiled = (
        _trained(configure(precision="fp32", compile=chosen), cuda, weights, windows, 10) for chosen in (False, True)
    )
    assert _loss(compiled, windows) == pytest.approx(_loss(eager, windows), abs=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_trains_like_fp32(
    cuda: torch.device, configure: Configure, weights: SharedVector, windows: Windows, optimizer: str
) -> None:
    exact, rounded = (
        _trained(configure(precision=precision, optimizer=optimizer), cuda, weights, windows, 50)
        for precision in ("fp32", "bf16")
    )
    assert _loss(rounded, windows) == pytest.approx(_loss(exact, windows), rel=0.02)


@pytest.mark.parametrize("preset", ["gpt2-small", "llama-1b"])
def test_attention_is_flash_attention(cuda: torch.device, preset: str) -> None:
    """Here any other kernel is an error."""
    model = Decoder(ModelSection(preset=preset, layers=1)).to(cuda)
    tokens = torch.randint(256, (1, 512), device=cuda)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", torch.bfloat16):
        torch.autograd.backward(model(tokens, targets=tokens) / tokens.numel())


def test_chunks_of_the_loss_save_memory(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab, dim, peaks, losses = 8192, 50_257, 256, [], []
    hidden = torch.randn(1, tokens, dim, device=cuda, requires_grad=True)
    head = torch.randn(vocab, dim, device=cuda, requires_grad=True)
    targets = torch.randint(vocab, (1, tokens), device=cuda)
    for chunk in (GPU_CHUNK // 8, 2**40):
        monkeypatch.setattr(loss_module, "GPU_CHUNK", chunk)
        hidden.grad = head.grad = None
        torch.cuda.reset_peak_memory_stats()
        loss = summed_loss(hidden, head, targets)
        torch.autograd.backward(loss)
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert peaks[0] < peaks[1] - 4 * tokens * vocab


def test_steps_do_not_wait_for_the_gpu(cuda: torch.device, configure: Configure, windows: Windows) -> None:
    """A step that asks the GPU for a number, such as a norm, would wait until its queue is empty."""
    for optimizer in ("adamw", "muon", "sgd"):
        config = configure(optimizer=optimizer)
        replica = Replica(config, cuda, 1)
        replica.load_weights(initial_weights(config.model, 1))
        replica.train(0, windows.batch(0, BATCH), BATCH)
        torch.cuda.set_sync_debug_mode("error")
        try:
            take_step(replica._parameters, Moments(*replica._moments, 1), 1, config.inner)
        finally:
            torch.cuda.set_sync_debug_mode("default")
