from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.experts.serving.request import Chat, ChatRequest, CompletionRequest, Refusal, Request, parse

FIELDS = st.sampled_from([*CompletionRequest.model_fields, *ChatRequest.model_fields, "tools"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=6,
)


class Bytes:
    """The tokens are bytes; those of a chat spell it in Python."""

    def prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Chat) -> list[int]:
        return self.prompt(repr(messages))


def refused(kind: type[Request] = CompletionRequest, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(json.dumps(fields).encode(), kind)
    return caught.value


def test_what_is_left_out_is_what_the_protocol_says() -> None:
    wanted = parse(b'{"model": "m", "prompt": "x"}', CompletionRequest)
    assert (wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.n) == (16, 1.0, 1.0, 1)
    assert (wanted.logprobs, wanted.echo, wanted.stream, wanted.stops) == (None, False, False, [])


def test_null_is_as_if_it_were_left_out() -> None:
    body = b'{"max_tokens": null, "stop": null, "temperature": null}'
    assert parse(body, CompletionRequest) == parse(b"{}", CompletionRequest)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("x", [[120]]),
        ([1, 2], [[1, 2]]),
        (["x", "yz"], [[120], [121, 122]]),
        ([[3], [4, 5]], [[3], [4, 5]]),
        ([], [[]]),
        ("", [[]]),
        ([[]], [[]]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_either(prompt: Any, ids: Any) -> None:
    wanted = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    assert wanted.prompts(Bytes()) == ids


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"best_of": 3}, "best_of", "is not supported"),
        ({"prompt": ["a"] * 65}, "prompt", "64 prompts a request at most"),
        ({"prompt": 5}, "prompt", "prompt: give a text, a list of tokens, or a list of several of either"),
        ({"prompt": ["a", 5]}, "prompt", "give a text"),
        ({"stop": 5}, "stop", "stop: give a text, or a list of texts"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"suffix": "x"}, "suffix", "is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "is not supported"),
        ({"tools": []}, "tools", "unknown field"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(fields: Any, param: str, said: str) -> None:
    refusal = refused(**fields)
    assert (refusal.status, refusal.param) == (400, param)
    assert said in refusal.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"prompt": "\\ud800"}', b'{"top_p": NaN}', b"\xff"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        parse(body, CompletionRequest)
    assert caught.value.status == 400


def outcome(body: bytes, kind: type[Request]) -> Request | Refusal:
    try:
        return parse(body, kind)
    except Refusal as refusal:
        return refusal


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@given(fields=st.dictionaries(FIELDS, ANYTHING, max_size=4))
def test_anything_is_understood_or_refused(kind: type[Request], fields: dict[str, Any]) -> None:
    found = outcome(json.dumps(fields).encode(), kind)
    if isinstance(found, Refusal):
        assert found.status == 400
        assert found.body()["error"]["message"]
    else:
        assert all(isinstance(ids, list) for ids in found.prompts(Bytes()))


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@given(body=st.binary(max_size=50))
def test_any_bytes_are_understood_or_refused(kind: type[Request], body: bytes) -> None:
    found = outcome(body, kind)
    assert isinstance(found, kind) or (isinstance(found, Refusal) and found.status == 400)


HELLO = {"role": "user", "content": "hello"}


def test_a_chat_goes_to_the_template_as_plain_messages() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"}
    wanted = parse(json.dumps({"messages": [HELLO, parts], "max_completion_tokens": 3}).encode(), ChatRequest)
    assert wanted.prompts(Bytes()) == [Bytes().chat([HELLO, {"role": "user", "content": "ab"}])]
    assert wanted.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"messages": [HELLO], "tools": []}, "tools"),
        ({"messages": [HELLO], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [HELLO], "echo": True}, "echo"),
        ({"messages": [HELLO], "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [HELLO], "prompt": "x"}, "prompt"),
    ],
)
def test_what_a_chat_cannot_be_is_refused_by_the_name_of_its_field(fields: Any, param: str) -> None:
    refusal = refused(ChatRequest, **fields)
    assert (refusal.status, refusal.param) == (400, param)
