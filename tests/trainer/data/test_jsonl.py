from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.trainer.data.documents import Document, Entry
from pier_node.trainer.data.sources import read_jsonl


def read(tmp_path: Path, data: bytes, field: str = "text") -> list[Document]:
    path = tmp_path / "some.jsonl"
    path.write_bytes(data)
    return list(read_jsonl(Entry("some.jsonl", path), field))


def test_a_line_is_a_document(tmp_path: Path) -> None:
    data = '{"text": "one\\n", "id": 1}\n\n  \n{"id": 2, "text": "zwei é"}'.encode()
    assert read(tmp_path, data) == [Document("some.jsonl:1", "one\n"), Document("some.jsonl:4", "zwei é")]


def test_another_field_can_be_the_text(tmp_path: Path) -> None:
    assert read(tmp_path, b'{"text": "no", "body": "yes"}', "body") == [Document("some.jsonl:1", "yes")]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    [document] = read(tmp_path, rb'{"text": "a\ud800b \ud83d\ude42"}')
    assert document.text == "a?b 🙂"


@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        (b"{oops", r"line 2: not JSON: Expecting property name", "one JSON object in UTF-8"),
        (b'{"text": "\xff"}', r"line 2: not JSON: .*utf-8", "one JSON object in UTF-8"),
        (b'["text"]', r"line 2: not a JSON object", "one JSON object"),
        (b'{"body": "x", "id": 1}', r'line 2: no field "text"', "one of the line's fields: body, id."),
        (b"{}", r'line 2: no field "text"', "fields: none."),
        (b'{"text": 7}', r'line 2: field "text" is not text', "text_field"),
        (b'{"text": null}', r'line 2: field "text" is not text', "text_field"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, problem: str, remedy: str) -> None:
    with pytest.raises(PierError, match=problem) as caught:
        read(tmp_path, b'{"text": "good"}\n' + line + b"\n")
    assert remedy in caught.value.remedy
    assert "some.jsonl" in caught.value.problem
