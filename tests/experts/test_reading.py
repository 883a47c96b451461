"""The text of a job, read in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from pier_node.base.errors import PierError
from pier_node.experts.domains import read_held_out, rows_of
from pier_node.experts.job import ExpertJob
from pier_node.experts.reading import MOST, checked, read

MakeJob = Callable[..., ExpertJob]


async def test_rows_and_tokens_come_from_another_process(make_job: MakeJob, tmp_path: Path) -> None:
    text = await read(make_job(), 4, tmp_path)
    rows, every = np.load(text.rows), rows_of(read_held_out(make_job().domain).texts["dev"], 4)
    assert len(every) > len(rows) == MOST
    assert np.array_equal(rows[[0, -1]], every[[0, -1]])
    assert {bytes(row) for row in rows} <= {bytes(row) for row in every}
    assert 0.85 < text.tokens / sum(path.stat().st_size for path in (tmp_path / "texts" / "sea").iterdir()) < 0.95


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"domain_hash": "0" * 32}, "not the one that was planned"),
        ({"steps": 100_000}, "epochs; allowed: 4"),
    ],
)
async def test_problems_come_back_in_words(
    make_job: MakeJob, tmp_path: Path, changed: dict[str, object], why: str
) -> None:
    with pytest.raises(PierError, match=why):
        await read(make_job(**changed), 32, tmp_path)


def test_too_little_text_to_judge_by_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(PierError, match="do not tell a good expert"):
        checked(make_job(max_epochs=100.0), 4096, tmp_path)


async def test_reading_ends_when_nobody_waits_for_it(make_job: MakeJob, tmp_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(make_job(), 32, tmp_path), 0.1)  # it takes longer to start alone
    assert set(psutil.Process().children()) <= {*before}
