from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.experts.merging import (
    MergedDecoder,
    SparseFeedForward,
    discriminant,
    is_merged,
    load,
    merge,
    save,
    tune,
    without,
)
from pier_node.outer.layout import Layout
from pier_node.rounds.saved_model import Weights
from pier_node.trainer.model.decoder import Decoder, stream

torch.set_num_threads(1)
SHAPE = {"preset": "llama-tiny", "context": 32, "kv_heads": 2, "rope_theta": 5000.0, "ffn_dim": 48}


def expert(number: int, **changed: Any) -> Decoder:
    """A decoder with random weights that follow from its number."""
    config = ModelSection.model_validate({**SHAPE, **changed})
    flat = torch.randn(Layout.of(config).length, generator=torch.Generator().manual_seed(number)) * 0.2
    return Weights(config, flat, "bytes", "").model(torch.device("cpu"))


def merged(count: int, active: int, seed: int = 0, **changed: Any) -> MergedDecoder:
    """Unlike experts with routers that pick unlike ones."""
    model = merge({f"e{number}": expert(number, **changed) for number in range(count)}, active)
    for router in routers(model):
        torch.nn.init.normal_(router, generator=torch.Generator().manual_seed(seed))
    return model


def routers(model: MergedDecoder) -> list[Tensor]:
    return [module.router.weight for module in model.modules() if isinstance(module, SparseFeedForward)]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(seed))


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = made
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("count", "active"), [(2, 1), (5, 2), (3, 3)])
def test_a_mixture_of_equal_experts_is_the_expert(tmp_path: Path, count: int, active: int, tied: bool) -> None:
    """Golden: through transformers too, whatever the routers say."""
    one = expert(7, tie_embeddings=tied)
    model = merge({f"e{number}": one for number in range(count)}, active)
    for number, router in enumerate(routers(model)):
        torch.nn.init.normal_(router, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        want = one(tokens())
        assert want.std() > 0.05
        torch.testing.assert_close(model(tokens()), want, rtol=0, atol=1e-5)
        theirs = transformers_model(save(model, tmp_path, "bytes"))
        torch.testing.assert_close(theirs(tokens()).logits, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("active", [1, 2, 4])
def test_transformers_computes_the_same_and_reads_the_same_back(tmp_path: Path, active: int) -> None:
    model = merged(4, active)
    theirs = transformers_model(save(model, tmp_path, "bytes"))
    assert type(theirs).__name__ == "MixtralForCausalLM"
    again = load(tmp_path)
    assert is_merged(tmp_path)
    assert (again.names, again.active) == (model.names, active)
    assert again.config == model.config.model_copy(update={"preset": again.config.preset})
    with torch.no_grad():
        want = model(tokens())
        torch.testing.assert_close(theirs(tokens()).logits, want, rtol=0, atol=1e-5)
        assert torch.equal(again(tokens()), want)
    made = theirs.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)
    assert made[0, 3:].tolist() == list(stream(model, [5, 6, 7], 12, temperature=0.0))


def test_all_active_with_even_routers_is_the_mean_of_the_parts() -> None:
    experts = [expert(number) for number in range(3)]
    layer = next(m for m in merge(dict(zip("abc", experts)), 3).modules() if isinstance(m, SparseFeedForward))
    x = torch.randn(2, 5, experts[0].config.dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = torch.stack([each.blocks["0"].mlp(x) for each in experts]).mean(dim=0)  # type: ignore[operator]
        torch.testing.assert_close(layer(x), want)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(3, 16), gone=st.integers(0, 15), active=st.integers(1, 4), seed=st.integers(0, 99))
def test_an_expert_without_a_row_is_never_picked(count: int, gone: int, active: int, seed: int) -> None:
    """Whatever its weights are: and where it was not picked before, nothing changes."""
    gone, active = gone % count, min(active, count - 1)
    model = merged(count, active, seed, layers=1)
    less = without(model, f"e{gone}")
    assert less.names == tuple(f"e{number}" for number in range(count) if number != gone)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in whole:
        if f".experts.{gone}." in name:
            whole[name].fill_(torch.nan)
    poisoned = merged(count, active, seed, layers=1)
    poisoned.load_state_dict(whole)
    with torch.no_grad():
        before, after = poisoned(tokens(seed)), less(tokens(seed))
    untouched = ~before.isnan().any(dim=-1)
    assert after.isfinite().all()
    torch.testing.assert_close(after[untouched], before[untouched], rtol=0, atol=1e-5)


def test_what_cannot_be_left_out_is_said() -> None:
    model = merged(2, 1)
    with pytest.raises(PierError, match="no expert of x"):
        without(model, "x")
    with pytest.raises(PierError, match="one expert left"):
        without(model, "e0")


@pytest.mark.parametrize(
    ("experts", "active", "said"),
    [
        ([expert(0), expert(1, ffn_dim=64)], 1, "unlike shapes: ffn_dim = 48 and 64"),
        ([expert(0), expert(1, rope_theta=1e4)], 1, "unlike shapes: rope_theta"),
        ([expert(0)], 1, "1 experts cannot be merged"),
        ([expert(0), expert(1)], 3, "--active 3: there are 2 experts"),
        ([expert(0, preset="gpt2-1m", kv_heads=4), expert(1, preset="gpt2-1m", kv_heads=4)], 1, "the form gpt2"),
    ],
)
def test_experts_that_cannot_be_merged_are_refused(experts: Sequence[Decoder], active: int, said: str) -> None:
    with pytest.raises(PierError, match=said) as caught:
        merge({f"e{number}": each for number, each in enumerate(experts)}, active)
    if "shapes" in said:
        assert "serve --experts" in caught.value.remedy


def test_the_discriminant_is_that_of_normal_samples() -> None:
    """Golden: two unit normals at ±a have the log-odds 2 a·x; the constant is zero by symmetry."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)
    noise = torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    rows = discriminant([noise + middle, -noise - middle])
    torch.testing.assert_close(rows[0] - rows[1], 2 * middle, rtol=0, atol=0.1)


def test_routers_that_are_informed_send_each_domain_to_its_expert() -> None:
    """Every expert but that of the domain predicts no number, and none of them is asked."""
    dice = np.random.default_rng(0)
    texts = {f"e{number}": 50 * number + dice.integers(0, 2, (16, 32)) for number in range(4)}
    for number, (name, rows) in enumerate(texts.items()):
        model = merged(4, 1)
        model.inform(texts)
        for other in range(4):
            for key, weight in model.named_parameters():
                if f".experts.{other}." in key and other != number:
                    weight.fill_(torch.nan)
        with torch.no_grad():
            assert model(torch.from_numpy(rows)).isfinite().all(), name


@pytest.mark.parametrize("routers_only", [True, False])
def test_training_lowers_the_loss_and_trains_what_it_shall(routers_only: bool) -> None:
    model = merged(3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, y = tokens(1).numpy(), tokens(2).numpy()
    first = model(torch.from_numpy(x), targets=torch.from_numpy(y)).item()
    told: list[int] = []
    tune(model, [(x, y)] * 20, 20, 1e-2, routers_only, told.append)
    with torch.no_grad():
        assert model(torch.from_numpy(x), targets=torch.from_numpy(y)).item() < first
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if not routers_only or name.endswith("router.weight")}
    assert sum(told) == 20


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ({"pier_experts": ["one"]}, "pier_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"intermediate_size": 47}, "do not fit"),
        ({"pier_experts": ["a", "b", "c"]}, "do not fit"),
    ],
)
def test_a_damaged_folder_is_said(tmp_path: Path, harm: dict[str, Any], said: str) -> None:
    save(merged(2, 1), tmp_path, "bytes")
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, **harm}))
    with pytest.raises(PierError, match=said):
        load(tmp_path)
