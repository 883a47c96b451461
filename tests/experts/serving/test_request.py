from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.experts.serving.request import CompletionRequest, Refusal, parse

FIELDS = st.sampled_from([*CompletionRequest.model_fields, "tools"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=6,
)


def refused(**fields: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(json.dumps(fields).encode())
    return caught.value


def test_what_is_left_out_is_what_the_protocol_says() -> None:
    wanted = parse(b'{"model": "m", "prompt": "x"}')
    assert (wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.n) == (16, 1.0, 1.0, 1)
    assert (wanted.logprobs, wanted.echo, wanted.stream, wanted.stops) == (None, False, False, [])


def test_null_is_as_if_it_were_left_out() -> None:
    assert parse(b'{"max_tokens": null, "stop": null, "temperature": null}') == parse(b"{}")


@pytest.mark.parametrize(
    ("prompt", "text"), [("x", "x"), ([1, 2], [1, 2]), (["x"], "x"), ([[3]], [3]), ([], []), ("", "")]
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_one(prompt: Any, text: Any) -> None:
    got = parse(json.dumps({"prompt": prompt}).encode()).text
    assert got == text or (not got and not text)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"n": 2}, "n", "one answer a request"),
        ({"best_of": 3}, "best_of", "one answer a request"),
        ({"prompt": ["a", "b"]}, "prompt", "one prompt a request"),
        ({"prompt": 5}, "prompt", "prompt"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"suffix": "x"}, "suffix", "is not done here"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not done here"),
        ({"presence_penalty": 0.5}, "presence_penalty", "is not done here"),
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
        parse(body)
    assert caught.value.status == 400


def outcome(body: bytes) -> CompletionRequest | Refusal:
    try:
        return parse(body)
    except Refusal as refusal:
        return refusal


@given(fields=st.dictionaries(FIELDS, ANYTHING, max_size=4))
def test_anything_is_understood_or_refused(fields: dict[str, Any]) -> None:
    found = outcome(json.dumps(fields).encode())
    if isinstance(found, Refusal):
        assert found.status == 400
        assert found.body()["error"]["message"]
    else:
        assert isinstance(found.text, (str, list))
        assert found.n == 1


@given(body=st.binary(max_size=50))
def test_any_bytes_are_understood_or_refused(body: bytes) -> None:
    found = outcome(body)
    assert isinstance(found, CompletionRequest) or found.status == 400
