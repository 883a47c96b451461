from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import DomainText, read_domain, read_domains


def written(folder: Path, name: str, rows: int, word: str = "row") -> DomainSection:
    """A domain of JSON lines."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"body": f"{word} {row} of {name}"}) + "\n" for row in range(rows)))
    return DomainSection(name=name, source="jsonl", path=str(path), text_field="body")


def read(section: DomainSection, train: int = 10_000, held_out: int = 10_000) -> DomainText:
    return read_domain(section, train, held_out)


def test_documents_are_trained_on_or_held_out_and_never_both(tmp_path: Path) -> None:
    found = read(written(tmp_path, "a", 200))
    train, held_out = ({*part.splitlines()} for part in (found.train, found.held_out))
    assert len(train | held_out) == 200
    assert train.isdisjoint(held_out)
    assert 5 <= len(held_out) <= 40
    assert found.tokens == len(found.train)
    assert found.sent == len(found.train) + len(found.held_out)


def test_samples_are_from_all_over_the_text(tmp_path: Path) -> None:
    found = read(written(tmp_path, "a", 5000), train=1000, held_out=300)
    assert 500 <= len(found.train) <= 1000
    assert len(found.held_out) <= 300
    rows = [int(line.split()[1]) for line in found.train.splitlines()]
    assert rows == sorted(rows)
    assert rows[-1] > 3500
    assert found.tokens > 50_000, "all of it counts"


def test_the_digest_is_that_of_the_text(tmp_path: Path) -> None:
    one = read(written(tmp_path, "a", 50))
    assert read(written(tmp_path, "a", 50)).digest == one.digest
    assert read(written(tmp_path, "a", 51)).digest != one.digest


def test_built_in_text_needs_not_be_sent() -> None:
    found = read(DomainSection(name="topics"))
    assert found.sent == 0
    assert found.tokens > 200_000


def test_too_little_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="domain a: too little text"):
        read(written(tmp_path, "a", 1))


def test_the_same_text_twice_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path, "a", 50)
    same = first.model_copy(update={"name": "b"})
    with pytest.raises(PierError, match="domains a and b have the same text"):
        read_domains([first, same], 1000, 1000)
    assert len(read_domains([first, written(tmp_path, "c", 50)], 1000, 1000)) == 2
