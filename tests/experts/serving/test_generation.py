"""Who answers, at what cost, and within which bounds."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from experts.serving.ensembles import GB, NAMES, make_ensemble, opened
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.experts.serving.generation import Answer, Asking, Limits, Telling, Token, pick, top
from pier_node.experts.serving.models import OwnReader
from pier_node.experts.serving.request import CompletionRequest, Refusal
from pier_node.outer.layout import Layout
from pier_node.trainer.model.export import byte_tokenizer, export, read_config

PROMPT = "def main(argv):\n    return"


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(**{"prompt": PROMPT, "max_tokens": 8, "seed": 3, **fields})


@asynccontextmanager
async def begun(asking: Asking, **fields: Any) -> AsyncIterator[Answer]:
    """The only answer to a request."""
    async with asking.begin(request(**fields)) as answers:
        yield await anext(answers)


async def made(asking: Asking, **fields: Any) -> tuple[str, Answer]:
    async with begun(asking, **fields) as answer:
        text = "".join(token.text for token in answer.echoed())
        while not answer.finish:
            text += "".join(token.text for token in await asking.compute(answer.step))
        return text, answer


async def refusal(asking: Asking, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await made(asking, **fields)
    return caught.value


async def test_all_experts_of_top_k_answer_as_all_experts_do(folder: Path) -> None:
    (dense, first), (topped, second) = [await made(opened(folder, top_k=k)) for k in (0, 3)]
    assert dense == topped
    assert first.posterior == pytest.approx(second.posterior, abs=1e-6)


async def test_one_expert_of_top_k_answers_as_it_does_alone(folder: Path) -> None:
    _, everybody = await made(opened(folder), max_tokens=0)
    best = max(everybody.posterior, key=lambda name: everybody.posterior[name])
    alone, _ = await made(opened(folder), model=best)
    text, answer = await made(opened(folder, top_k=1))
    assert text == alone
    assert answer.posterior == {best: 1.0}


@pytest.mark.parametrize("top_k", [1, 2, 0])
async def test_a_token_costs_what_the_experts_that_speak_cost(folder: Path, top_k: int) -> None:
    asking = opened(folder, top_k=top_k)
    async with begun(asking) as answer:
        names = set(answer.posterior)
        with FlopCounterMode(display=False) as counted:
            answer.step()
        flops = {expert.name: expert.flops for expert in asking.experts}
        assert len(names) == (top_k or 3)
        assert answer.flops_per_token == pytest.approx(sum(flops[name] for name in names))
        # PyTorch does not count the scores and sums of a fused attention, which are 4 · layers · dim · context.
        configs = [read_config(expert.folder) for expert in asking.experts if expert.name in names]
        attention = sum(4 * config.layers * config.dim * config.context for config in configs)
        assert counted.get_total_flops() == pytest.approx(answer.flops_per_token - attention, rel=0.01)


async def test_a_missing_expert_is_dropped_and_the_weights_are_renormalised(folder: Path) -> None:
    asking = opened(folder)
    shutil.rmtree(folder / "e1")
    _, answer = await made(asking)
    assert set(answer.posterior) == {"topics", "network"}
    assert sum(answer.posterior.values()) == pytest.approx(1)
    assert asking.models == ["mine", "topics", "network"]


async def test_damaged_weights_are_dropped_with_top_k_too(folder: Path) -> None:
    (folder / "e0" / "model.safetensors").write_bytes(b"\xff" * 100)
    _, answer = await made(opened(folder, top_k=2))
    assert set(answer.posterior) == {"encodings", "network"}


async def test_the_first_expert_that_can_be_is_loaded_at_the_start(folder: Path) -> None:
    asking = opened(folder)
    (folder / "e0" / "model.safetensors").write_bytes(b"\xff" * 100)
    await asking.load()
    assert (asking.pool.lost, asking.pool.resident) == ({0}, [1])


async def test_without_an_expert_there_is_no_answer(folder: Path) -> None:
    asking = opened(folder)
    for number in range(3):
        (folder / f"e{number}" / "model.safetensors").unlink()
    assert (await refusal(asking)).status == 503
    assert asking.models == ["mine"]


async def test_a_domain_whose_parent_stands_in_shares_its_weights(tmp_path: Path) -> None:
    folder = make_ensemble(tmp_path / "mine")
    text = (folder / "ensemble.json").read_text()
    (folder / "ensemble.json").write_text(text.replace('"folder": "e2"', '"folder": "e0"'))
    asking = opened(folder)
    assert [expert.name for expert in asking.experts] == ["topics+network", "encodings"]
    _, answer = await made(asking, max_tokens=0, prompt="x")
    assert answer.posterior == pytest.approx({"topics+network": 2 / 3, "encodings": 1 / 3})


async def test_memory_for_two_of_three_is_enough_for_top_two(folder: Path) -> None:
    asking = opened(folder)
    sizes = sorted(expert.size for expert in asking.experts)
    text, _ = await made(opened(folder, top_k=2))
    tight = opened(folder, top_k=2, memory=(sizes[1] + sizes[2]) / GB)
    answers = await asyncio.gather(*[made(tight) for _ in range(4)])
    assert [told for told, _ in answers] == [text] * 4
    assert sum(tight.experts[index].size for index in tight.pool.resident) <= sizes[1] + sizes[2]
    with pytest.raises(PierError, match="is too little"):
        opened(folder, memory=(sizes[1] + sizes[2]) / GB)


async def test_a_prompt_longer_than_the_context_is_read_and_gone_on_from(folder: Path) -> None:
    text, answer = await made(opened(folder), prompt="x = 1\n" * 100, max_tokens=80)
    assert answer.prompt_tokens == 600
    assert answer.made == 80
    assert text


async def test_an_empty_prompt_goes_on_from_the_end_of_another_text(folder: Path) -> None:
    text, answer = await made(opened(folder), prompt="")
    assert answer.prompt_tokens == 1
    assert text == (await made(opened(folder), prompt="\n"))[0]


async def test_tokens_are_a_prompt_too(folder: Path) -> None:
    assert (await made(opened(folder)))[0] == (await made(opened(folder), prompt=list(PROMPT.encode())))[0]


async def test_the_seed_decides(folder: Path) -> None:
    first, again, other = [(await made(opened(folder), seed=seed, max_tokens=20))[0] for seed in (1, 1, 2)]
    assert first == again != other


async def test_echo_repeats_the_prompt_and_says_what_it_was_worth(folder: Path) -> None:
    asking = opened(folder)
    async with begun(asking, echo=True, logprobs=0, max_tokens=0) as answer:
        tokens = answer.echoed()
    assert "".join(token.text for token in tokens) == PROMPT
    assert tokens[0].log_prob is None
    model = cast(OwnReader, asking.experts[0].load()).model
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        logs = torch.log_softmax(model(ids)[0], -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    async with begun(opened(folder), echo=True, logprobs=0, max_tokens=0, model=NAMES[0]) as alone:
        told = [token.log_prob for token in alone.echoed()][1:]
    np.testing.assert_allclose(np.array(told, dtype=float), logs.numpy(), atol=1e-5)


async def test_what_is_too_much_is_refused(folder: Path) -> None:
    asking = opened(folder)
    asking.limits = Limits(prompt=10, made=5)
    assert (await refusal(asking, max_tokens=6)).param == "max_tokens"
    assert (await refusal(asking, prompt="x" * 11, max_tokens=5)).code == "context_length_exceeded"
    assert (await refusal(asking, prompt=[256], max_tokens=5)).param == "prompt"
    assert (await refusal(asking, prompt="x", model="nobody")).code == "model_not_found"
    await made(asking, prompt="x" * 10, max_tokens=5)


async def test_more_than_fit_at_once_are_told_to_come_again(folder: Path) -> None:
    asking = opened(folder)
    asking.limits = replace(asking.limits, at_once=1)
    async with asking.begin(request()):
        late = await refusal(asking)
    assert (late.status, late.retry_after) == (429, 1)
    await made(asking)


async def test_nothing_is_waited_for_without_end(folder: Path) -> None:
    asking = opened(folder)
    asking.limits = replace(asking.limits, seconds=0.0)
    assert (await refusal(asking)).status == 504
    asking.limits = Limits()
    await made(asking)


async def test_a_text_ends_where_the_expert_ends_it(tmp_path: Path) -> None:
    library = byte_tokenizer()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    config = ModelSection(preset="llama-tiny", vocab_size=257)
    weights = torch.randn(Layout.of(config).length, generator=torch.Generator().manual_seed(1)) * 0.05
    folder = tmp_path / "mine"
    export(config, weights, folder / "e0", str(tmp_path / "tokenizer.json"))
    (folder / "ensemble.json").write_text('{"members": [{"domain": "topics", "folder": "e0"}]}')
    text, answer = await made(opened(folder), max_tokens=4000, prompt="")
    assert answer.finish == "stop"
    assert 1 <= answer.made < 4000  # each token has about one chance in 257 to be the end
    assert "endoftext" not in text


def test_experts_with_unlike_tokenizers_are_not_mixed(folder: Path) -> None:
    path = folder / "e1" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(PierError, match="unlike tokenizers"):
        opened(folder)


def test_one_that_cannot_be_read_at_all_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "e0" / "config.json").write_text("{")
    asking = opened(folder)
    assert [expert.name for expert in asking.experts] == ["encodings", "network"]
    assert "the expert of topics is left out" in caplog.text
    assert asking.experts[0].size == 4 * Layout.of(read_config(asking.experts[0].folder)).length


LOGS = np.log([0.1, 0.5, 0.15, 0.25])


def counts(temperature: float, top_p: float, draws: int = 4000) -> list[float]:
    random = np.random.default_rng(1)
    drawn = [pick(LOGS, temperature, top_p, random) for _ in range(draws)]
    return [float(share) for share in np.bincount(drawn, minlength=4) / draws]


def test_temperature_one_draws_as_the_distribution_says() -> None:
    assert counts(1.0, 1.0) == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.03)


def test_half_the_temperature_squares_the_chances() -> None:
    squares = np.array([0.01, 0.25, 0.0225, 0.0625])
    assert counts(0.5, 1.0) == pytest.approx(squares / squares.sum(), abs=0.03)


@pytest.mark.parametrize(
    ("top_p", "left"), [(0.0, [1]), (0.5, [1]), (0.51, [1, 3]), (0.75, [1, 3]), (0.8, [1, 2, 3]), (0.95, [0, 1, 2, 3])]
)
def test_top_p_leaves_the_fewest_tokens_that_have_so_much(top_p: float, left: list[int]) -> None:
    assert [token for token, share in enumerate(counts(1.0, top_p, 500)) if share] == left


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0, 2, allow_subnormal=True),
    top_p=st.floats(0, 1),
    spread=st.sampled_from([0.0, 1.0, 300.0]),
)
def test_any_setting_gives_a_token_that_is_there(seed: int, temperature: float, top_p: float, spread: float) -> None:
    random = np.random.default_rng(seed)
    logs = random.normal(size=9) * spread
    assert 0 <= pick(logs, temperature, top_p, random) < 9


def test_temperature_zero_takes_the_first_of_the_likeliest() -> None:
    assert pick(np.array([-3.0, -1.0, -1.0]), 0.0, 1.0, np.random.default_rng(0)) == 1


def test_the_top_tokens_come_in_order() -> None:
    assert top(LOGS, 3) == [1, 3, 2]
    assert top(LOGS, 9) == [1, 3, 2, 0]


TEXTS = st.text("ab", max_size=3)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def first(text: str, stops: list[str]) -> int:
    return min([at for stop in stops if (at := text.find(stop)) >= 0], default=-1)


@given(pieces=st.lists(TEXTS, max_size=12), stops=STOPS)
def test_what_is_told_is_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    telling, told, made = Telling(stops), "", ""
    for piece in pieces:
        made += piece
        told += "".join(token.text for token in telling.push(Token(piece)))
        if telling.stopped:
            break
        assert made.startswith(told)
        assert first(made, stops) < 0
    cut = first(made, stops)
    assert telling.stopped == (cut >= 0)
    told += "".join(token.text for token in telling.end())
    assert told == (made if cut < 0 else made[:cut])


@given(pieces=st.lists(TEXTS, max_size=12))
def test_without_stops_every_token_is_told_at_once(pieces: list[str]) -> None:
    telling = Telling()
    assert all(telling.push(Token(piece)) == [Token(piece)] for piece in pieces)
    assert telling.end() == []


def test_only_what_may_become_a_stop_is_held() -> None:
    telling = Telling(["end."])
    assert [token.text for token in telling.push(Token("the "))] == ["the "]
    assert telling.push(Token("en")) == []
    assert [token.text for token in telling.push(Token("t"))] == ["en", "t"]


def test_a_token_in_which_a_stop_begins_is_cut_and_keeps_what_it_was() -> None:
    telling = Telling(["\n"])
    assert telling.push(Token("a\nb", -1.5, {"x": -1.0}, {"topics": 1.0})) == [
        Token("a", -1.5, {"x": -1.0}, {"topics": 1.0})
    ]
    assert telling.stopped
