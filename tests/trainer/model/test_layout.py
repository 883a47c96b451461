import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout, is_decayed
from pier_node.trainer.model.decoder import Decoder


def test_parameters_lie_one_after_the_other() -> None:
    layout = Layout.laid([("a", (2, 3)), ("b", (4,))])
    assert [(it.name, it.offset) for it in layout.entries] == [("a", 0), ("b", 6)]
    assert layout.length == 10


@st.composite
def configs(draw: st.DrawFn) -> ModelSection:
    form = draw(st.sampled_from(["llama", "gpt2"]))
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * (draw(st.integers(1, 3)) if form == "llama" else 1)
    return ModelSection.model_validate(
        {
            "form": form,
            "vocab_size": draw(st.integers(1, 40)),
            "dim": heads * 2 * draw(st.integers(1, 3)),
            "layers": draw(st.integers(1, 4)),
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn_dim": draw(st.integers(1, 20)),
            "context": draw(st.integers(1, 16)),
            "tie_embeddings": draw(st.booleans()),
        }
    )


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
    ],
)
def test_published_sizes(preset: str, parameters: int) -> None:
    assert Layout.of(ModelSection(preset=preset)).length == parameters


@settings(max_examples=30, deadline=None)
@given(configs())
def test_entries_lie_end_to_end_in_the_order_of_the_parameters(config: ModelSection) -> None:
    layout = Layout.of(config)
    model = Decoder(config)
    end = 0
    for entry, (name, parameter) in zip(layout.entries, model.named_parameters(), strict=True):
        assert (entry.name, entry.shape, entry.offset) == (name, tuple(parameter.shape), end)
        end += parameter.numel()
    assert layout.length == end == sum(parameter.numel() for parameter in model.parameters())


@settings(max_examples=30, deadline=None)
@given(configs(), st.integers(0, 2**32))
def test_load_then_store_gives_the_same_vector(config: ModelSection, seed: int) -> None:
    layout = Layout.of(config)
    flat = torch.randn(layout.length, generator=torch.Generator().manual_seed(seed))
    model = Decoder(config)
    layout.load(model, flat)
    back = torch.full_like(flat, torch.nan)
    layout.store(dict(model.named_parameters()), back)
    assert torch.equal(back, flat)


def test_views_share_memory_with_the_vector(config: ModelSection) -> None:
    layout = Layout.of(config)
    flat = torch.zeros(layout.length)
    for number, view in enumerate(layout.views(flat).values()):
        view += number
    entry = layout.entries[5]
    assert flat[entry.offset : entry.offset + entry.size].eq(5).all()


def test_tied_embeddings_are_there_once(config: ModelSection) -> None:
    names = [entry.name for entry in Layout.of(config).entries]
    assert names.count("embedding.weight") == 1
    assert ("head.weight" in names) == (not config.tie_embeddings)


def test_a_range_loads_and_stores_its_own_part_only(config: ModelSection, weights: Tensor) -> None:
    layout = Layout.of(config)
    middle = Decoder(config, range(1, 2))
    layout.load(middle, weights)
    flat = torch.zeros(layout.length)
    layout.store(dict(middle.named_parameters()), flat)
    for name, view in layout.views(flat).items():
        expected = layout.views(weights)[name]
        assert torch.equal(view, expected if name.startswith("blocks.1.") else torch.zeros_like(expected))


def test_a_bfloat16_model_gets_rounded_weights_and_gives_them_back(config: ModelSection, weights: Tensor) -> None:
    layout = Layout.of(config)
    model = Decoder(config).to(torch.bfloat16)
    layout.load(model, weights)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    flat = torch.zeros(layout.length)
    layout.store(dict(model.named_parameters()), flat)
    assert torch.equal(flat, weights.bfloat16().float())


def test_loading_leaves_no_trace_for_the_gradient(model: Decoder, weights: Tensor) -> None:
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert not weights.requires_grad


@pytest.mark.parametrize("more", [-1, 1])
def test_a_vector_of_another_length_is_refused(config: ModelSection, more: int) -> None:
    layout = Layout.of(config)
    with pytest.raises(ValueError, match=rf"\[{layout.length + more}\].*\[{layout.length}\]"):
        layout.views(torch.zeros(layout.length + more))


def test_a_tensor_that_would_be_broadcast_or_is_unknown_is_refused(config: ModelSection) -> None:
    layout = Layout.of(config)
    flat = torch.zeros(layout.length)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \[1\], not \[32\]"):
        layout.store({"norm.weight": torch.ones(1)}, flat)
    with pytest.raises(KeyError, match=r"blocks\.9"):
        layout.store({"blocks.9.norm.weight": torch.ones(32)}, flat)


def test_matrices_are_decayed_norms_and_biases_are_not() -> None:
    layout = Layout.of(ModelSection(preset="gpt2-1m", layers=1))
    assert [entry.name for entry in layout.entries if is_decayed(entry.shape)] == [
        "embedding.weight",
        "positions.weight",
        "blocks.0.attention.query.weight",
        "blocks.0.attention.key.weight",
        "blocks.0.attention.value.weight",
        "blocks.0.attention.output.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
    ]
