from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pier_node.trainer.data.tokens import BROKEN, ByteTokenizer, Spelling


@given(before=st.binary(max_size=8), made=st.binary(max_size=30))
@example(before=b"\xf1", made=b"\x80\x80\xc0\x80")
@example(before=b"", made=b"\x80\xf0\x9f\x98\x82")
def test_what_is_spelled_is_the_text(before: bytes, made: bytes) -> None:
    spelling = Spelling(ByteTokenizer(), [])
    text = "".join([*(spelling.push(byte) for byte in before + made), spelling.end()])
    assert text == (before + made).decode(errors="replace")


def test_a_character_comes_with_its_last_byte() -> None:
    spelling = Spelling(ByteTokenizer(), list("né".encode())[:2])
    assert [spelling.push(byte) for byte in "東".encode()] == ["", "", "東"]
    assert spelling.push(0xE6) == ""
    assert spelling.end() == BROKEN
