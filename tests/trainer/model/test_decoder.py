from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.decoder import Decoder


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
