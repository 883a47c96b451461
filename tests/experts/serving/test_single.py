"""A single model: one that Pier's decoder knows, and one that transformers computes, asked by the protocol's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
import transformers
from experts.serving.ensembles import make_expert, opened, served

from pier_node.base.errors import PierError
from pier_node.experts.serving.generation import Asking
from pier_node.experts.serving.models import HubModel, OwnModel, OwnReader
from pier_node.experts.serving.request import Refusal
from pier_node.experts.serving.tokenizer import ModelTokenizer
from pier_node.trainer.model.export import byte_tokenizer

END = 256
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ("user", "assistant", "system") %}{{ raise_exception("who is " ~ message.role) }}{% endif %}
[{{ message.role }}]{% generation %}{{ message["content"] | trim | tojson(ensure_ascii=False) }}{% endgeneration %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
CHAT: list[Any] = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hëllo <b>"}]


def write_tokenizer(folder: Path) -> None:
    library = byte_tokenizer()
    library.add_special_tokens(["<|im_end|>", "<s>"])
    library.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    about |= {"bos_token": "<s>", "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def make_hub_model(folder: Path) -> Path:
    """A Qwen2, which Pier's decoder does not know, with random weights."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(params=["own", "hub"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_expert(tmp_path / "mine", 1) if request.param == "own" else make_hub_model(tmp_path / "mine")


def alone(folder: Path) -> Asking:
    return opened(folder, model=folder)


def test_without_a_token_that_ends_texts_nothing_ends_them(tmp_path: Path) -> None:
    library = byte_tokenizer()
    library.add_tokens(["None"])
    library.save(str(tmp_path / "tokenizer.json"))
    assert ModelTokenizer(tmp_path).ends == set()


def client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60.0)


def test_each_kind_is_computed_by_what_knows_it(tmp_path: Path) -> None:
    own, hub = (
        alone(make(tmp_path / name)) for make, name in ((lambda it: make_expert(it, 0), "o"), (make_hub_model, "h"))
    )
    assert isinstance(own.experts[0], OwnModel)
    assert isinstance(hub.experts[0], HubModel)
    assert (hub.experts[0].vocab_size, hub.experts[0].context) == (258, 64)
    assert hub.experts[0].size > hub.experts[0].flops > 0


@pytest.mark.parametrize(
    ("more", "option"),
    [({"experts": Path("e")}, "--experts"), ({"top_k": 1}, "--top-k"), ({"posterior": "bayes"}, "--posterior")],
)
def test_what_is_for_ensembles_is_refused_for_a_single_model(tmp_path: Path, more: dict[str, Any], option: str) -> None:
    with pytest.raises(PierError, match=f"{option} is for an ensemble"):
        opened(tmp_path, model=tmp_path, **more)


async def test_several_prompts_and_answers_are_what_each_is_alone(model: Path) -> None:
    async with served(alone(model)) as address:
        ask = client(address).completions.create
        same: Any = {"model": "mine", "max_tokens": 6, "seed": 5, "logprobs": 1}
        both = await ask(prompt=["import os", "def"], n=2, **same)
        first, second = [await ask(prompt=prompt, n=2, **same) for prompt in ("import os", "def")]
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in both.choices] == [it.text for it in (*first.choices, *second.choices)]
        assert first.choices[0].text != first.choices[1].text
        assert both.usage is not None
        assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (9 + 3, 4 * 6)
        parts = await ask(prompt=["import os", "def"], n=2, stream=True, **same)
        texts = ["", "", "", ""]
        async for part in parts:
            texts[part.choices[0].index] += part.choices[0].text
        assert texts == [choice.text for choice in both.choices]


async def test_a_prompt_is_scored_with_the_likeliest_tokens_at_each_place(model: Path) -> None:
    asking = alone(model)
    ids = list(b"import os, sys\n" * 3)
    with torch.no_grad():
        if isinstance(asking.experts[0], HubModel):
            whole = transformers.AutoModelForCausalLM.from_pretrained(model)(torch.tensor([ids])).logits[0]
        else:
            ids = ids[:30]  # its context has 32
            loaded = asking.experts[0].load()
            assert isinstance(loaded, OwnReader)
            whole = loaded.model(torch.tensor([ids]))[0]
        logs = torch.log_softmax(whole.double(), -1).numpy()
    async with served(asking) as address:
        told = await client(address).completions.create(
            model="mine", prompt=[ids, ids[:9]], max_tokens=1, temperature=0, echo=True, logprobs=1
        )
    for choice, count in zip(told.choices, (len(ids), 9)):
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert len(found.token_logprobs) == count + 1
        given = [logs[at - 1, ids[at]] for at in range(1, count)]
        np.testing.assert_allclose(found.token_logprobs[1:count], given, atol=1e-4)
        greedy = [max(top.values()) == it for top, it in zip(found.top_logprobs[1:], found.token_logprobs[1:])]
        assert greedy[:-1] == [logs[at - 1].argmax() == ids[at] for at in range(1, count)]
        assert greedy[-1]


async def test_greedy_text_is_that_of_transformers_up_to_its_end(tmp_path: Path) -> None:
    folder = make_hub_model(tmp_path / "mine")
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([list(b"import os")])
    want = whole.generate(prompt, do_sample=False, max_new_tokens=40, attention_mask=torch.ones_like(prompt))[0, 9:]
    async with served(alone(folder)) as address:
        told = await client(address).completions.create(model="mine", prompt="import os", max_tokens=40, temperature=0)
    assert told.usage is not None
    assert told.usage.completion_tokens == len(want)
    text = ModelTokenizer(folder).decode(want.tolist())
    assert told.choices[0].text == text
    assert told.choices[0].finish_reason == ("stop" if want[-1] == END else "length")


async def test_a_text_may_be_longer_than_the_context(model: Path) -> None:
    async with served(alone(model)) as address:
        told = await client(address).completions.create(
            model="mine", prompt="x = 1\n" * 30, max_tokens=50, logit_bias={}
        )
    assert told.usage is not None
    assert told.usage.prompt_tokens == 180


async def test_a_chat_is_answered_in_the_form_of_a_chat(tmp_path: Path) -> None:
    async with served(alone(make_hub_model(tmp_path / "mine"))) as address:
        ask = client(address).chat.completions.create
        same: Any = {"model": "mine", "messages": CHAT, "seed": 2, "max_completion_tokens": 8, "n": 2}
        told = await ask(logprobs=True, top_logprobs=3, **same)
        assert told.object == "chat.completion"
        assert [choice.message.role for choice in told.choices] == ["assistant", "assistant"]
        logs = told.choices[0].logprobs
        assert logs is not None
        assert logs.content is not None
        assert "".join(each.token for each in logs.content) == told.choices[0].message.content
        assert all(len(each.top_logprobs) == 3 for each in logs.content)
        stream = await ask(stream=True, stream_options={"include_usage": True}, **same)
        parts = [part async for part in stream]
        assert parts[-1].usage == told.usage
        texts = ["", ""]
        for part in parts[:-1]:
            texts[part.choices[0].index] += part.choices[0].delta.content or ""
        assert texts == [choice.message.content for choice in told.choices]
        with pytest.raises(openai.BadRequestError, match="who is developer"):
            await ask(model="mine", messages=[{"role": "developer", "content": "x"}])


@pytest.mark.parametrize("as_file", [False, True])
def test_a_chat_is_written_as_transformers_writes_it(tmp_path: Path, as_file: bool) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_tokenizer(folder)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    if as_file:
        (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    want = library.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    ids = ModelTokenizer(folder).chat(CHAT)
    assert ids == library.encode(want, add_special_tokens=False)
    assert ids[0] == END + 1


def test_without_a_chat_template_completions_are_named(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="/v1/completions"):
        ModelTokenizer(make_expert(tmp_path / "mine", 0)).chat(CHAT)


async def test_health_and_metrics_are_told(model: Path) -> None:
    asking = alone(model)
    await asking.load()
    assert asking.pool.resident == [0]
    async with served(asking) as address, aiohttp.ClientSession() as session:
        await client(address).completions.create(model="mine", prompt=["ab", "c"], n=2, max_tokens=5)
        with pytest.raises(openai.NotFoundError):
            await client(address).completions.create(model="other", prompt="x")
        async with session.get(f"{address}/health") as answer:
            assert (answer.status, (await answer.json())["ok"]) == (200, True)
        async with session.get(f"{address}/metrics") as answer:
            told = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if not line.startswith("#"))
    assert told['pier_serve_requests_total{path="/v1/completions",status="200"}'] == "1.0"
    assert told['pier_serve_requests_total{path="/v1/completions",status="404"}'] == "1.0"
    assert told['pier_serve_tokens_total{kind="prompt"}'] == "3.0"
    assert 4 <= float(told['pier_serve_tokens_total{kind="completion"}']) <= 20
    assert told["pier_serve_prompt_seconds_count"] == "1.0"
    assert told["pier_serve_requests_in_work"] == "0.0"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda it: (it / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda it: (it / "config.json").unlink(), "has no config.json"),
        (lambda it: (it / "config.json").write_text('{"model_type": "nothing"}'), "cannot read this model"),
    ],
)
def test_a_folder_that_cannot_be_served_is_said_at_the_start(tmp_path: Path, harm: Any, said: str) -> None:
    folder = make_hub_model(tmp_path / "mine")
    harm(folder)
    with pytest.raises(PierError, match=said):
        alone(folder)


async def test_too_many_answers_are_refused(tmp_path: Path) -> None:
    async with served(alone(make_expert(tmp_path / "mine", 0))) as address:
        with pytest.raises(openai.BadRequestError, match="64 answers a request at most"):
            await client(address).completions.create(model="mine", prompt=["x"] * 33, n=2)
