from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout, is_decayed
from pier_node.trainer.model.decoder import Decoder, Past, stream


def part(config: ModelSection, weights: Tensor, blocks: range) -> Decoder:
    decoder = Decoder(config, blocks)
    Layout.of(config).load(decoder, weights)
    return decoder


@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3), (0, 3)])
def test_ranges_compose_to_the_whole_model(
    config: ModelSection, weights: Tensor, model: Decoder, tokens: Tensor, cuts: tuple[int, ...]
) -> None:
    x = tokens
    for first, end in pairwise(cuts):
        x = part(config, weights, range(first, end))(x)
    assert torch.equal(x, model(tokens))


def test_one_product_for_query_key_and_value_changes_nothing(model: Decoder, tokens: Tensor) -> None:
    found = []
    for joint in (False, True):
        if joint:
            model.join_products()
        model.zero_grad()
        model(tokens).square().mean().backward()
        found.append([it.grad.clone() for it in model.parameters() if it.grad is not None])
    assert found[0]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_a_range_has_the_names_of_the_whole_model_and_only_its_own_parameters(config: ModelSection) -> None:
    whole = dict(Decoder(config).named_parameters())
    middle = dict(Decoder(config, range(1, 2)).named_parameters())
    assert set(middle) == {name for name in whole if name.startswith("blocks.1.")}
    ends = [dict(Decoder(config, blocks).named_parameters()) for blocks in (range(2), range(2, 3))]
    assert set(ends[0]) | set(ends[1]) == set(whole)
    assert set(ends[0]) & set(ends[1]) == ({"embedding.weight"} if config.tie_embeddings else set())


def test_the_two_gradients_of_a_tied_embedding_add_up_to_that_of_the_whole_model(
    config: ModelSection, weights: Tensor, model: Decoder, tokens: Tensor
) -> None:
    first, last = part(config, weights, range(1)), part(config, weights, range(1, 3))
    last(first(tokens)).square().mean().backward()
    model(tokens).square().mean().backward()
    ends = [dict(decoder.named_parameters()) for decoder in (first, last)]
    for name, parameter in model.named_parameters():
        gradients = [gradient for end in ends if name in end and (gradient := end[name].grad) is not None]
        torch.testing.assert_close(sum(gradients), parameter.grad, rtol=1e-4, atol=1e-6)


def test_documents_that_a_separator_begins_do_not_see_each_other(model: Decoder, tokens: Tensor) -> None:
    """What is before a document changes nothing in it, but positions go on; without a separator it does."""
    model.separator = 7
    tokens = tokens.clamp(min=8)
    tokens[:, 9] = 7
    changed = tokens.clone()
    changed[:, :9] = changed[:, :9].roll(1, dims=1) ^ 1
    logits, after = model(tokens), model(changed)
    assert torch.equal(logits[:, 9:], after[:, 9:])
    assert not torch.allclose(logits[:, 8], after[:, 8])
    model.separator = None
    assert torch.equal(model(tokens)[:, :9], model(tokens[:, :9])) or torch.allclose(
        model(tokens)[:, :9], logits[:, :9], atol=1e-5
    )
    assert not torch.allclose(model(tokens)[:, 9:], model(changed)[:, 9:])


def test_a_document_in_a_sequence_has_the_logits_of_one_alone(model: Decoder, tokens: Tensor) -> None:
    if model.config.form == "gpt2":
        torch.nn.init.zeros_(model.positions.weight)  # they are counted from the start of the sequence
    model.separator = 7
    tokens = tokens.clamp(min=8)
    tokens[:, 9] = 7
    torch.testing.assert_close(model(tokens)[:, 9:], model(tokens[:, 9:]), rtol=1e-4, atol=1e-5)


def test_a_later_token_never_changes_an_earlier_logit(model: Decoder, tokens: Tensor) -> None:
    logits = model(tokens)
    for position in (1, 11, 23):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
        after = model(changed)
        assert torch.equal(after[:, :position], logits[:, :position])
        assert not torch.equal(after[:, position:], logits[:, position:])


def test_the_order_of_the_earlier_tokens_matters(model: Decoder, tokens: Tensor) -> None:
    swapped = tokens.clone()
    swapped[:, [3, 7]] = tokens[:, [7, 3]]
    assert not torch.allclose(model(swapped)[:, -1], model(tokens)[:, -1], atol=1e-4)


def test_every_parameter_gets_a_gradient(model: Decoder, tokens: Tensor) -> None:
    torch.autograd.backward(nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A bias of the keys adds the same to all scores of a query: softmax takes it away again, up to rounding.
    assert not [name for name in still if not name.endswith("key.bias")]


def test_built_on_the_meta_device_it_is_whole_once_loaded(
    config: ModelSection, weights: Tensor, model: Decoder, tokens: Tensor
) -> None:
    with torch.device("meta"):
        empty = Decoder(config)
    assert not dict(empty.named_buffers())
    other = empty.to_empty(device="cpu")
    Layout.of(config).load(other, weights)
    assert torch.equal(other(tokens), model(tokens))


def test_bfloat16_autocast_comes_close_to_fp32(model: Decoder, tokens: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    exact = model(tokens)
    assert (logits - exact).norm() / exact.norm() < 0.03


def test_rotary_positions_turn_a_pair_by_position_times_speed() -> None:
    """One head of 4 dimensions at theta 100: speeds 1 and 0.1; dimension 0 pairs with 2, and 1 with 3."""
    config = ModelSection(form="llama", dim=4, heads=1, kv_heads=1, layers=1, rope_theta=100.0)
    cos, sin = Decoder(config)._rotation(torch.zeros(1, 3, 4))
    angles = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 0.1, 1.0, 0.1], [2.0, 0.2, 2.0, 0.2]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_rotary_positions_are_computed_once() -> None:
    model = Decoder(ModelSection(preset="llama-tiny"))
    one, other = (model._rotation(torch.zeros(1, time, 4)) for time in (5, 3))
    later = model._rotation(torch.zeros(1, 2, 4), start=3)
    for some, fewer, last in zip(one, other, later):
        assert some.data_ptr() == fewer.data_ptr()
        assert torch.equal(some[3:], last)


CPU = torch.device("cpu")


@pytest.mark.parametrize("cuts", [(24,), (1,) * 24, (5, 1, 1, 9, 8), (23, 1)])
@torch.no_grad()
def test_in_parts_a_text_gets_the_same_logits(model: Decoder, tokens: Tensor, cuts: tuple[int, ...]) -> None:
    text, past = tokens[:1], Past(model.config, CPU)
    parts = [model(part, past) for part in torch.split(text, list(cuts), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(text), rtol=1e-4, atol=1e-4)
    assert past.length == 24


@torch.no_grad()
def test_a_cleared_past_knows_nothing(model: Decoder, tokens: Tensor) -> None:
    past = Past(model.config, CPU)
    model(tokens[:1, :10], past)
    past.clear()
    torch.testing.assert_close(model(tokens[:1, 3:9], past), model(tokens[:1, 3:9]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_more_than_the_context_is_refused(model: Decoder, tokens: Tensor) -> None:
    past = Past(model.config, CPU)
    model(tokens[:1], past)
    with pytest.raises(ValueError, match="25 tokens do not fit into a context of 24"):
        model(tokens[:1, :1], past)


@torch.no_grad()
def test_ranges_of_blocks_have_pasts_of_their_own(config: ModelSection, model: Decoder, tokens: Tensor) -> None:
    first, last = Decoder(config, range(2)), Decoder(config, range(2, 3))
    for part in (first, last):
        part.load_state_dict(model.state_dict(), strict=False)
    pasts = Past(config, CPU, range(2)), Past(config, CPU, range(2, 3))
    got = [last(first(part, pasts[0]), pasts[1]) for part in (tokens[:1, :7], tokens[:1, 7:8])]
    torch.testing.assert_close(torch.cat(got, dim=1), model(tokens[:1, :8]), rtol=1e-4, atol=1e-4)


PROMPT = [1, 2, 3]


def generate(model: Decoder, prompt: list[int], count: int, **more: Any) -> list[int]:
    return list(stream(model, prompt, count, **more))


def test_greedy_takes_the_likeliest_token_each_time(model: Decoder) -> None:
    tokens = list(PROMPT)
    for _ in range(10):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, PROMPT, 10, temperature=0.0) == tokens[3:]
    assert generate(model, PROMPT, 10, temperature=0.0, seed=9) == tokens[3:]
    assert generate(model, PROMPT, 10, temperature=1.0, top_k=1, seed=5) == tokens[3:]


def test_a_temperature_near_zero_is_greedy(model: Decoder) -> None:
    assert generate(model, PROMPT, 8, temperature=1e-9) == generate(model, PROMPT, 8, temperature=0.0)


def test_the_seed_decides(model: Decoder) -> None:
    first = generate(model, PROMPT, 20, temperature=2.0, seed=4)
    torch.manual_seed(77)
    assert generate(model, PROMPT, 20, temperature=2.0, seed=4) == first
    assert generate(model, PROMPT, 20, temperature=2.0, seed=5) != first


@pytest.mark.parametrize("count", [0, 1, 30])
def test_it_gives_exactly_count_tokens_of_the_vocabulary(model: Decoder, count: int) -> None:
    made = generate(model, PROMPT, count, temperature=3.0)
    assert len(made) == count
    assert all(0 <= token < 61 for token in made)


def test_only_the_last_context_tokens_are_seen(model: Decoder) -> None:
    long = [token % 61 for token in range(40)]
    assert len(long) > model.config.context
    made = generate(model, long, 30, temperature=0.0)
    assert made == generate(model, long[-model.config.context :], 30, temperature=0.0)
    assert len(made) == 30


def test_a_prompt_stays_as_it_was_and_tokens_come_one_by_one(model: Decoder) -> None:
    prompt = list(PROMPT)
    endless = stream(model, prompt, 10**9, temperature=0.0)
    assert list(islice(endless, 3)) == generate(model, PROMPT, 3, temperature=0.0)
    assert prompt == PROMPT


def loaded_coin() -> Decoder:
    """Whatever came before, the logits are [ln 3, 0, -1]."""
    config = ModelSection(form="gpt2", vocab_size=3, dim=2, layers=1, heads=1, context=2, tie_embeddings=False)
    layout = Layout.of(config)
    flat = torch.zeros(layout.length)
    layout.views(flat)["norm.bias"][0] = 1.0
    layout.views(flat)["head.weight"][:, 0] = torch.tensor([1.0986123, 0.0, -1.0])
    model = Decoder(config)
    layout.load(model, flat)
    return model


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.75), (0.5, 0.9), (2.0, 0.6339746)])
def test_tokens_come_as_often_as_the_model_says(temperature: float, share: float) -> None:
    """Of the two likeliest: 3 : 1, sharpened by the temperature. 2000 draws are off by 0.01."""
    made = generate(loaded_coin(), [0], 2000, temperature=temperature, top_k=2, seed=1)
    assert set(made) == {0, 1}
    assert made.count(0) / 2000 == pytest.approx(share, abs=0.035)


def test_without_top_k_all_tokens_come() -> None:
    assert set(generate(loaded_coin(), [0], 300, temperature=1.0)) == {0, 1, 2}
    assert set(generate(loaded_coin(), [0], 300, temperature=1.0, top_k=99)) == {0, 1, 2}


def test_a_model_that_has_diverged_says_so(model: Decoder) -> None:
    next(model.parameters()).data.fill_(torch.nan)
    with pytest.raises(PierError, match="diverged"):
        generate(model, [1], 1)


def test_a_token_that_the_model_lacks_is_refused(model: Decoder) -> None:
    with pytest.raises(PierError, match="the prompt has the token 1000"):
        generate(model, [1, 1000], 1)


def test_an_empty_prompt_is_refused(model: Decoder) -> None:
    with pytest.raises(PierError, match="prompt is empty"):
        generate(model, [], 5)


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
