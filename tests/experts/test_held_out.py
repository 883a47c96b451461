"""What no expert trains on, in three splits: docs/experts.md, "From a run to an ensemble", 6."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_domain, read_held_out, rows_of
from pier_node.trainer.data.corpus import open_corpus


def domain(folder: Path, documents: int) -> DomainSection:
    folder.mkdir()
    for number in range(documents):
        (folder / f"{number}.txt").write_text(f"<{number}>" * (3 + number % 5))
    return DomainSection(name="mine", source="text", path=str(folder))


def test_every_document_is_trained_on_or_in_one_split(tmp_path: Path) -> None:
    section = domain(tmp_path / "texts", 400)
    found = read_held_out(section)
    corpus = open_corpus(section.data, 0, 1, None, tmp_path / "cache")
    parts = [bytes(np.asarray(corpus.train)), *found.texts.values()]
    assert found.tokens == len(corpus.train)
    assert sum(map(len, found.texts.values())) == len(corpus.validation)
    for number in range(400):
        assert sum(f"<{number}>".encode() in part for part in parts) == 1
    lengths = [len(text) for text in found.texts.values()]
    assert max(lengths) - min(lengths) <= 7 * 5 + 1  # a document


def test_the_digest_is_the_one_that_was_planned_with(tmp_path: Path) -> None:
    section = domain(tmp_path / "texts", 100)
    assert read_held_out(section).digest == read_domain(section, 1000, 1000).digest


def test_too_few_documents_are_told(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="none of them is held out for"):
        read_held_out(domain(tmp_path / "texts", 5))


@given(st.binary(max_size=300), st.integers(1, 40))
def test_rows_predict_each_byte_but_the_first_once(text: bytes, context: int) -> None:
    rows = rows_of(text, context)
    assert rows.shape == (max(0, (len(text) - 1) // context), context + 1)
    targets = np.concatenate([row[1:] for row in rows]) if len(rows) else np.array([], dtype=np.uint8)
    assert bytes(targets) == text[1 : 1 + len(targets)]
    assert all(one[-1] == two[0] for one, two in pairwise(rows))
