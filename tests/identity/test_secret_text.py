from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.identity.node import read, spell


@given(st.binary(min_size=8, max_size=48))
def test_what_is_spelled_can_be_read(body: bytes) -> None:
    text = spell("x1-", body)
    assert read("x1-", len(body), f"  {text.upper()[:9]}\n{text[9:]} ") == body


@given(st.integers(0, 35), st.sampled_from("abcdefgh234567"))
def test_a_slip_is_found(place: int, letter: str) -> None:
    text = spell("x1-", b"a secret of some size")
    slipped = text[: 3 + place] + letter + text[4 + place :]
    if slipped != text:
        with pytest.raises(PierError, match="check digits"):
            read("x1-", 21, slipped)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "starts with x1-"), ("y1-aaaa", "starts with x1-"), ("x1-aaaa", "it has 7 characters, a token has 43")],
)
def test_another_text_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PierError, match=problem) as error:
        read("x1-", 21, text)
    assert "Copy the token again, from `x1-`" in str(error.value.remedy)
