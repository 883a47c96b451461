"""The text of a domain; and the text of a job, read in a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from pier_node.base.errors import PierError
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import (
    MOST_ROWS,
    DomainText,
    checked_text,
    read_domain,
    read_domains,
    read_held_out,
    read_text,
    rows_of,
)
from pier_node.experts.job import ExpertJob


def written(folder: Path, name: str, rows: int, word: str = "row") -> DomainSection:
    """A domain of JSON lines."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"body": f"{word} {row} of {name}"}) + "\n" for row in range(rows)))
    return DomainSection(name=name, source="jsonl", path=str(path), text_field="body")


def sampled(section: DomainSection, train: int = 10_000, held_out: int = 10_000) -> DomainText:
    return read_domain(section, train, held_out)


def test_documents_are_trained_on_or_held_out_and_never_both(tmp_path: Path) -> None:
    found = sampled(written(tmp_path, "a", 200))
    train, held_out = ({*part.splitlines()} for part in (found.train, found.held_out))
    assert len(train | held_out) == 200
    assert train.isdisjoint(held_out)
    assert 5 <= len(held_out) <= 40
    assert found.tokens == len(found.train)
    assert found.sent == len(found.train) + len(found.held_out)


def test_samples_are_from_all_over_the_text(tmp_path: Path) -> None:
    found = sampled(written(tmp_path, "a", 5000), train=1000, held_out=300)
    assert 500 <= len(found.train) <= 1000
    assert len(found.held_out) <= 300
    rows = [int(line.split()[1]) for line in found.train.splitlines()]
    assert rows == sorted(rows)
    assert rows[-1] > 3500
    assert found.tokens > 50_000, "all of it counts"


def test_the_digest_is_that_of_the_text(tmp_path: Path) -> None:
    one = sampled(written(tmp_path, "a", 50))
    assert sampled(written(tmp_path, "a", 50)).digest == one.digest
    assert sampled(written(tmp_path, "a", 51)).digest != one.digest


def test_built_in_text_needs_not_be_sent() -> None:
    found = sampled(DomainSection(name="topics"))
    assert found.sent == 0
    assert found.tokens > 200_000


def test_too_little_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="domain a: too little text"):
        sampled(written(tmp_path, "a", 1))


def test_the_same_text_twice_is_refused(tmp_path: Path) -> None:
    first = written(tmp_path, "a", 50)
    same = first.model_copy(update={"name": "b"})
    with pytest.raises(PierError, match="domains a and b have the same text"):
        read_domains([first, same], 1000, 1000)
    assert len(read_domains([first, written(tmp_path, "c", 50)], 1000, 1000)) == 2


MakeJob = Callable[..., ExpertJob]


async def test_rows_and_tokens_come_from_another_process(make_job: MakeJob, tmp_path: Path) -> None:
    text = await read_text(make_job(), 4, tmp_path)
    rows, every = np.load(text.rows), rows_of(read_held_out(make_job().domain).texts["dev"], 4)
    assert len(every) > len(rows) == MOST_ROWS
    assert np.array_equal(rows[[0, -1]], every[[0, -1]])
    assert {bytes(row) for row in rows} <= {bytes(row) for row in every}
    assert 0.85 < text.tokens / sum(path.stat().st_size for path in (tmp_path / "texts" / "sea").iterdir()) < 0.95


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"domain_hash": "0" * 32}, "not the one that was planned"), ({"steps": 100_000}, "epochs; allowed: 4")],
)
async def test_problems_come_back_in_words(
    make_job: MakeJob, tmp_path: Path, changed: dict[str, object], why: str
) -> None:
    with pytest.raises(PierError, match=why):
        await read_text(make_job(**changed), 32, tmp_path)


def test_too_little_text_to_judge_by_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(PierError, match="do not tell a good expert"):
        checked_text(make_job(max_epochs=100.0), 4096, tmp_path)


async def test_reading_ends_when_nobody_waits_for_it(make_job: MakeJob, tmp_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read_text(make_job(), 32, tmp_path), 0.1)  # it takes longer to start alone
    assert set(psutil.Process().children()) <= {*before}
