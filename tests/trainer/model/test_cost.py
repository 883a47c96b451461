from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainer.hub_cases import made

from bench.device_memory import case, counted
from pier_node.config.presets import PRESETS
from pier_node.config.run import ModelSection, RunConfig
from pier_node.trainer.model.cost import (
    chosen,
    device_bytes,
    flops_per_token,
    forward_flops_per_token,
    sent_bytes,
    training_bytes,
)
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.hub import read_config
from pier_node.trainer.parallel import Parallel


@pytest.mark.parametrize(
    ("preset", "flops"),
    [
        # 6 * (124 439 808 - 1024 * 768) + 12 * 12 * 768 * 1024
        ("gpt2-small", 855_166_464.0),
        # 6 * (6 738 415 616 - 32 000 * 4096) + 12 * 32 * 4096 * 4096
        ("llama-7b", 46_086_512_640.0),
    ],
)
def test_golden(preset: str, flops: float) -> None:
    assert flops_per_token(ModelSection(preset=preset)) == flops


@pytest.mark.parametrize(
    ("width", "vocabulary", "giga"),
    [
        *((2304, 128_002, 1.255), (3072, 128_002, 1.383), (3840, 128_002, 1.510)),
        *((2304, 260, 0.667), (3072, 260, 0.794), (3840, 260, 0.921)),
    ],
)
def test_experts_of_hdee(width: int, vocabulary: int, giga: float) -> None:
    """Experts as wide as those of HDEE (arXiv 2502.19385), with head and attention."""
    sizes = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_dim": width, "context": 1024}
    model = ModelSection.model_validate({**sizes, "vocab_size": vocabulary, "tie_embeddings": False})
    assert flops_per_token(model) / 1e9 == pytest.approx(giga, abs=5e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers_costs_what_the_same_decoder_does(tied: bool, tmp_path: Path) -> None:
    """A Mistral whose window is as long as its context is a Llama."""
    made("mistral", tmp_path, sliding_window=None, tie_word_embeddings=tied)
    theirs = read_config(tmp_path)
    ours = ModelSection.model_validate({**theirs.model_dump(exclude={"transformers"}), "form": "llama"})
    assert flops_per_token(theirs) == flops_per_token(ours)
    for parallel in (Parallel("ddp"), Parallel("fsdp", checkpointing="full")):
        bytes_of = [device_bytes(RunConfig(model=each), parallel, 2, bf16=True) for each in (theirs, ours)]
        assert bytes_of[0] == bytes_of[1] > 0


def test_it_agrees_with_what_torch_counts_in_the_matrix_products(config: ModelSection) -> None:
    """Exactly, but for attention, which torch counts by kernel, and norms and biases, which are no products."""
    model = Decoder(config)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(1, config.context, dtype=torch.long)).sum().backward()
    products = ("mm", "addmm", "bmm")
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in products)
    attention = 12 * config.layers * config.dim * config.context
    vectors = 6 * sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    assert counted / config.context == flops_per_token(config) - attention - vectors


@torch.no_grad()
def test_predicting_without_learning_costs_a_third(config: ModelSection) -> None:
    model = Decoder(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, config.context, dtype=torch.long))
    products = ("mm", "addmm", "bmm")
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in products)
    attention = 4 * config.layers * config.dim * config.context
    vectors = 2 * sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    assert counted / config.context == forward_flops_per_token(config) - attention - vectors


@pytest.mark.parametrize(("width", "sent", "state"), [(2304, 577, 4.6), (3072, 620, 5.0), (3840, 662, 5.3)])
def test_hdee_small_close(width: int, sent: int, state: float) -> None:
    """An expert in bf16, its state, and the logits of a sequence."""
    sizes = {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn_dim": width, "context": 1024}
    model = ModelSection.model_validate({**sizes, "vocab_size": 128_002, "tie_embeddings": False})
    assert round(sent_bytes(model) / 1e6) == sent
    logits = training_bytes(model, 43) - training_bytes(model, 1)
    assert logits == 42 * 1024 * 128_002 * (2 + 4), "11.0 and 22.0 GB"
    assert (training_bytes(model) - logits / 42) / 1e9 == pytest.approx(state, abs=0.05)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "parallel",
    [Parallel("fsdp"), Parallel("fsdp", 1, "full"), Parallel("fsdp", 2), Parallel("fsdp", 4), Parallel("ddp", 8)],
)
def test_predicted_bytes_of_a_worker_are_near_to_what_pytorch_counts(parallel: Parallel) -> None:
    config = case("llama-7b", 3, 8 // parallel.tensor)
    assert device_bytes(config, parallel, 8, bf16=True) == pytest.approx(counted(config, parallel, 8), rel=0.1)


def test_a_residual_stream_in_bf16_takes_as_much_less_as_is_predicted() -> None:
    config, parallel, found = case("llama-7b", 3, 1), Parallel("ddp"), list[int]()
    for stream in ("auto", "bf16"):
        run = config.model_copy(
            update={"inner": config.inner.model_copy(update={"micro_batch": 8, "residual_stream": stream})}
        )
        found.append(counted(run, parallel, 1))
        assert device_bytes(run, parallel, 1, bf16=True) == pytest.approx(found[-1], rel=0.1)
    assert found[1] < 0.95 * found[0]


GPU = 80 * 10**9


@pytest.mark.parametrize(
    ("given", "preset", "workers", "memory", "expected"),
    [
        (Parallel(), "llama-125m", 8, GPU, Parallel("ddp")),
        (Parallel(), "llama-7b", 8, GPU, Parallel("fsdp")),
        (Parallel(), "llama-7b", 8, GPU * 3 // 8, Parallel("fsdp", 1, "selective")),
        (Parallel(), "llama-7b", 8, GPU // 4, Parallel("fsdp", 1, "full")),
        (Parallel(tensor=2), "llama-7b", 8, GPU, Parallel("fsdp", 2)),
        (Parallel(), "llama-7b", 1, GPU, Parallel("ddp", 1, "full")),
        (Parallel(), "llama-7b", 2, 0, Parallel("ddp")),
        (Parallel("hsdp", 2, "full"), "llama-125m", 8, GPU, Parallel("hsdp", 2, "full")),
    ],
)
def test_auto_takes_the_first_way_that_fits(
    given: Parallel, preset: str, workers: int, memory: int, expected: Parallel
) -> None:
    config = case(preset, PRESETS[preset]["layers"], workers)
    assert chosen(given, config, workers, memory, bf16=True) == expected
