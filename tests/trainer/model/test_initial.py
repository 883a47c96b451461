from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.initial import FIXED, fixed_embedding, initial_weights, widened


def named(config: ModelSection, seed: int) -> dict[str, Tensor]:
    return Layout.of(config).views(initial_weights(config, seed))


def test_the_seed_and_nothing_else_decides(config: ModelSection) -> None:
    first = initial_weights(config, 7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(initial_weights(config, 7), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(initial_weights(config, 8), first)
    assert first.dtype == torch.float32


def test_fixed_embeddings_are_the_same_everywhere() -> None:
    found = fixed_embedding(ModelSection(dim=32, vocab_size=61, subspace=8, tie_embeddings=False))
    assert found.shape == (61, 24)
    assert found[0, :3].tolist() == [-17, 18, 59]
    assert found[60, 23].item() == 29
    assert 0.0175 < (found * FIXED).std() < 0.0190


def test_no_two_tensors_are_alike(config: ModelSection) -> None:
    starts = [view.flatten()[:4] for view in named(config, 1).values() if view.ndim == 2]
    assert len({tuple(start.tolist()) for start in starts}) == len(starts)


@pytest.mark.parametrize("preset", ["llama-1m", "gpt2-1m"])
def test_deviations_norms_and_biases(preset: str) -> None:
    config = ModelSection(preset=preset)
    for name, view in named(config, 1).items():
        if name.endswith(".bias"):
            assert view.eq(0).all()
        elif "norm" in name:
            assert view.eq(1).all()
        else:
            residual = name.endswith(("output.weight", "down.weight"))
            # 5 layers: 0.02 / sqrt(10). A deviation over 16384 elements is itself off by 0.6 %.
            assert view.std().item() == pytest.approx(0.0063245553 if residual else 0.02, rel=0.03)
            assert abs(view.mean().item()) < 5 * 0.02 / math.sqrt(view.numel())


def test_a_tensor_does_not_depend_on_the_rest_of_the_model() -> None:
    small, large = (ModelSection(preset="llama-tiny", layers=layers) for layers in (2, 3))
    shallow, deep = named(small, 3), named(large, 3)
    assert torch.equal(shallow["blocks.1.mlp.gate.weight"], deep["blocks.1.mlp.gate.weight"])


@pytest.mark.parametrize("preset", ["llama-tiny", "llama-1m", "gpt2-1m"])
def test_the_first_loss_is_that_of_a_guess(preset: str) -> None:
    config = ModelSection(preset=preset)
    model = Decoder(config)
    Layout.of(config).load(model, initial_weights(config, 1))
    x = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.06)


LLAMA: dict[str, Any] = {"preset": "llama-tiny", "ffn_dim": 24, "context": 16}
GPT2: dict[str, Any] = {"preset": "gpt2-1m", "dim": 32, "layers": 2, "heads": 2, "ffn_dim": 24, "context": 16}


def built(shape: dict[str, Any], **changed: Any) -> ModelSection:
    return ModelSection.model_validate({**shape, **changed})


def decoder(config: ModelSection, flat: torch.Tensor) -> Decoder:
    model = Decoder(config)
    Layout.of(config).load(model, flat)
    return model


def noisy(config: ModelSection) -> torch.Tensor:
    """Weights that have been somewhere: larger, and with biases."""
    flat = initial_weights(config, seed=3)
    return flat + 0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("shape", [LLAMA, GPT2])
@settings(max_examples=15, deadline=None)
@given(wide=st.integers(24, 80), seed=st.integers(0, 2**63 - 1))
def test_the_wide_model_computes_the_same(shape: dict[str, Any], wide: int, seed: int) -> None:
    narrow, wider = built(shape), built(shape, ffn_dim=wide)
    flat, tokens = noisy(narrow), torch.arange(32).view(2, 16)
    with torch.no_grad():
        one, other = (
            decoder(narrow, flat)(tokens),
            decoder(wider, widened(narrow, wider, flat, seed))(tokens),
        )
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    assert one.std() > 0.1


@pytest.mark.parametrize("shape", [LLAMA, GPT2])
def test_copies_differ_in_their_part_and_go_their_own_way(shape: dict[str, Any]) -> None:
    narrow, wider = built(shape), built(shape, ffn_dim=48)
    flat = widened(narrow, wider, noisy(narrow), seed=5)
    ups = Layout.of(wider).views(flat)["blocks.0.mlp.up.weight"]
    model = decoder(wider, flat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pairs = [(i, j) for i in range(24) for j in range(24, 48) if torch.equal(ups[i], ups[j])]
    assert len(pairs) == 24  # each of the new ones is a copy
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.arange(16)[None])[0], torch.arange(16)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = model.get_parameter("blocks.0.mlp.up.weight").detach()
    apart = [float((after[i] - after[j]).abs().max()) for i, j in pairs]
    assert min(apart) > 0
    assert sorted(apart)[len(apart) // 2] > 1e-3


def test_a_seed_always_gives_the_same_bits_and_another_other_ones() -> None:
    narrow, wider = built(LLAMA), built(LLAMA, ffn_dim=48)
    flat = noisy(narrow)
    assert torch.equal(widened(narrow, wider, flat, 1), widened(narrow, wider, flat, 1))
    assert not torch.equal(widened(narrow, wider, flat, 1), widened(narrow, wider, flat, 2))
    assert torch.equal(widened(narrow, narrow, flat, 1), flat)


@pytest.mark.parametrize("changed", [{"ffn_dim": 23}, {"dim": 64}, {"layers": 3}])
def test_what_is_not_wider_alone_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(PierError, match="cannot be widened"):
        widened(built(LLAMA), built(LLAMA, **changed), noisy(built(LLAMA)), 1)
