from itertools import islice

import pytest
import torch

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.outer.layout import Layout
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.generate import generate, stream

PROMPT = [1, 2, 3]


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
    made = generate(loaded_coin(), [0], 2000, temperature, top_k=2, seed=1)
    assert set(made) == {0, 1}
    assert made.count(0) / 2000 == pytest.approx(share, abs=0.035)


def test_without_top_k_all_tokens_come() -> None:
    assert set(generate(loaded_coin(), [0], 300, temperature=1.0)) == {0, 1, 2}
    assert set(generate(loaded_coin(), [0], 300, temperature=1.0, top_k=99)) == {0, 1, 2}


def test_an_empty_prompt_is_refused(model: Decoder) -> None:
    with pytest.raises(PierError, match="prompt is empty"):
        generate(model, [], 5)
