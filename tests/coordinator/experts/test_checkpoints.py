"""Checkpoints that sites give the coordinator: what it takes, keeps and gives."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from pier_coordinator.experts.checkpoints import FOLDER, Checkpoints
from pier_coordinator.store.sites import Refused, TooFast
from pier_node.experts.resume import FILE, Kept, ResumeState, most_bytes
from pier_proto.v1.coordinator_pb2 import CheckpointPart

PLAN, NODE, LENGTH = "ab" * 16, "0123456789abcdef", 5


def content(folder: Path, step: int, value: float = 1.0) -> bytes:
    """What a site would send after a step."""
    ResumeState(step, step, *(np.full(LENGTH, value, dtype=np.float32) for _ in range(3))).save(folder, "cd" * 16)
    return (folder / FILE).read_bytes()


def meant(raw: bytes, step: int, job: int = 0) -> Kept:
    return Kept(job=job, step=step, size=len(raw), digest=hashlib.sha256(raw).hexdigest())


async def pieces(raw: bytes, each: int = 100) -> AsyncIterator[CheckpointPart]:
    for start in range(0, len(raw), each):
        yield CheckpointPart(piece=raw[start : start + each])


async def give(to: Checkpoints, raw: bytes, step: int, job: int = 0) -> None:
    await to.take(NODE, meant(raw, step, job), LENGTH, pieces(raw), lambda: True)


async def got(of: Checkpoints, job: int = 0) -> tuple[int, bytes]:
    parts = [part async for part in of.parts(job)]
    return parts[0].checkpoint.step, b"".join(part.piece for part in parts)


def spoil(path: Path, content: bytes | None) -> None:
    """Something else lies there, or nothing."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).rglob("*") if path.is_file())


async def test_the_latest_of_each_job_is_kept_and_given_as_it_came(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, PLAN)
    first, second, other = (content(tmp_path, step) for step in (3, 8, 5))
    await give(kept, first, 3)
    await give(kept, other, 5, job=1)
    await give(kept, second, 8)
    assert await got(kept) == (8, second)
    assert await got(kept, 1) == (5, other)
    assert [kept.step(job) for job in (0, 1, 2)] == [8, 5, 0]
    assert len(files(tmp_path)) == 2
    with pytest.raises(Refused, match="after step 8 of that expert is kept"):
        await give(kept, first, 3)


async def test_they_outlast_the_coordinator_and_what_is_of_no_use_does_not(tmp_path: Path) -> None:
    before = Checkpoints(tmp_path, PLAN)
    raw = content(tmp_path, 3)
    await give(before, raw, 3)
    folder = tmp_path / FOLDER / PLAN
    (folder / f"0-{NODE}.part").write_bytes(raw[:50])
    later = folder / f"0-7-{hashlib.sha256(raw).hexdigest()}.safetensors"
    later.write_bytes(raw)  # killed before the last one was deleted
    (folder / f"999-7-{'0' * 64}.safetensors").write_bytes(raw)
    assert Checkpoints(tmp_path, PLAN).of(0) == meant(raw, 7)
    assert files(tmp_path) == [later.name]
    assert Checkpoints(tmp_path, "ef" * 16).of(0) is None


async def test_what_is_done_is_deleted_and_so_is_another_plan_s(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, PLAN)
    for job in (0, 1):
        await give(kept, content(tmp_path, 3), 3, job)
    kept.drop(0)
    kept.drop(0)
    assert (kept.step(0), kept.step(1), len(files(tmp_path))) == (0, 3, 1)
    Checkpoints(tmp_path, "ef" * 16).clear()
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (lambda raw: raw[:-1], "hash is not that of"),
        (lambda raw: raw[:-1] + b"!", "hash is not that of"),
        (lambda raw: raw + b"more", "more than the"),
        (lambda _: b"", "hash is not that of the 0 bytes"),
    ],
)
async def test_what_is_not_what_was_meant_is_refused(
    tmp_path: Path, spoilt: Callable[[bytes], bytes], said: str
) -> None:
    kept = Checkpoints(tmp_path, PLAN)
    last, raw = content(tmp_path, 2), content(tmp_path, 3)
    await give(kept, last, 2)
    with pytest.raises(Refused, match=said):
        await kept.take(NODE, meant(raw, 3), LENGTH, pieces(spoilt(raw)), lambda: True)
    assert kept.step(0) == 2
    assert await got(kept) == (2, last), "the last one is as it was"


@pytest.mark.parametrize(
    ("raw", "length", "said"),
    [
        (b"noise", LENGTH, "not a checkpoint of that expert"),
        (bytes(most_bytes(LENGTH) + 1), LENGTH, "4157 bytes: one of that expert has 4156 at most"),
    ],
)
async def test_what_no_training_gives_is_refused(tmp_path: Path, raw: bytes, length: int, said: str) -> None:
    kept = Checkpoints(tmp_path, PLAN)
    with pytest.raises(Refused, match=said):
        await give(kept, raw, 3)
    assert files(tmp_path) == []


async def test_weights_that_ran_away_or_are_of_another_size_are_refused(tmp_path: Path) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    with pytest.raises(Refused, match="has values that no training gives"):
        await give(kept, content(tmp_path, 3, float("nan")), 3)
    with pytest.raises(Refused, match="not F32"):
        await kept.take(NODE, meant(raw, 3), LENGTH + 1, pieces(raw), lambda: True)
    with pytest.raises(Refused, match="not one after step 4"):
        await give(kept, raw, 4)


async def test_one_that_nobody_needs_any_more_is_not_kept_and_one_that_is_written_already_is(tmp_path: Path) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    with pytest.raises(Refused, match="not needed any more"):
        await kept.take(NODE, meant(raw, 3), LENGTH, pieces(raw), lambda: False)
    answers = iter([True, False])
    await kept.take(NODE, meant(raw, 3), LENGTH, pieces(raw), lambda: next(answers))
    assert kept.step(0) == 3, "the job has gone to another site, which continues from it"


async def test_a_site_sends_one_at_a_time_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    reached = asyncio.Event()

    async def stuck() -> AsyncIterator[CheckpointPart]:
        yield CheckpointPart(piece=raw[:10])
        reached.set()
        await asyncio.Event().wait()

    first = asyncio.create_task(kept.take(NODE, meant(raw, 3), LENGTH, stuck(), lambda: True))
    await reached.wait()
    with pytest.raises(TooFast, match="another checkpoint of this site is on its way"):
        await give(kept, raw, 3)
    first.cancel()
    await asyncio.wait([first])
    monkeypatch.setattr(Kept, "deadline", 0.05)
    with pytest.raises(Refused, match="longer than"):
        await kept.take(NODE, meant(raw, 3), LENGTH, stuck(), lambda: True)
    assert len(files(tmp_path)) == 1, "what has come"
    monkeypatch.setattr(Kept, "deadline", 60.0)
    await give(kept, raw, 3)


async def test_one_that_was_interrupted_goes_on_where_it_stopped_even_after_a_restart(tmp_path: Path) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    about, digest = meant(raw, 3), hashlib.sha256(raw).hexdigest()

    async def broken() -> AsyncIterator[CheckpointPart]:
        yield CheckpointPart(piece=raw[:100])
        raise ConnectionError("the line broke")

    with pytest.raises(Refused, match="cannot keep it"):
        await kept.take(NODE, about, LENGTH, broken(), lambda: True)
    assert kept.inbox.arrived(NODE, digest) == 0, "the disk is to blame for an error of the system"

    await interrupted(kept, raw, 100)
    again = Checkpoints(tmp_path, PLAN)
    assert again.inbox.arrived(NODE, digest) == 100
    assert again.inbox.arrived(NODE, "0" * 64) == again.inbox.arrived("f" * 16, digest) == 0
    await again.take(NODE, about, LENGTH, pieces(raw[100:]), lambda: True, offset=100)
    assert await got(again) == (3, raw)
    assert len(files(tmp_path)) == 1
    assert again.inbox.arrived(NODE, digest) == 0


async def interrupted(kept: Checkpoints, raw: bytes, after: int) -> None:
    """The site's connection breaks after so many bytes."""
    reached = asyncio.Event()

    async def parts() -> AsyncIterator[CheckpointPart]:
        yield CheckpointPart(piece=raw[:after])
        reached.set()
        await asyncio.Event().wait()

    giving = asyncio.create_task(kept.take(NODE, meant(raw, 3), LENGTH, parts(), lambda: True))
    await reached.wait()
    giving.cancel()
    await asyncio.wait([giving])


@pytest.mark.parametrize(("offset", "said"), [(101, "continues at byte 101, and 100 bytes are here"), (99, "hash")])
async def test_one_that_goes_on_elsewhere_than_it_stopped_is_refused_and_begins_again(
    tmp_path: Path, offset: int, said: str
) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    await interrupted(kept, raw, 100)
    with pytest.raises(Refused, match=said):
        await kept.take(NODE, meant(raw, 3), LENGTH, pieces(raw[100:]), lambda: True, offset)
    await give(kept, raw, 3)
    assert await got(kept) == (3, raw)


async def test_there_is_a_part_of_one_at_most_from_each_site(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, PLAN)
    for step in (3, 4, 5):
        await interrupted(kept, content(tmp_path, step), 100)
    assert len(files(tmp_path)) == 1


async def test_a_site_that_has_a_part_gets_what_follows(tmp_path: Path) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    digest = hashlib.sha256(raw).hexdigest()
    await give(kept, raw, 3)
    for known, offset, start in ((digest, 100, 100), (digest, len(raw), len(raw)), (digest, len(raw) + 1, 0)):
        first, *rest = [part async for part in kept.parts(0, known, offset)]
        assert first.offset == start
        assert b"".join(part.piece for part in rest) == raw[start:]
    first, *rest = [part async for part in kept.parts(0, "0" * 64, 100)]
    assert (first.offset, b"".join(part.piece for part in rest)) == (0, raw)


async def test_a_damaged_one_is_not_given_and_makes_room(tmp_path: Path) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    with pytest.raises(Refused, match="no checkpoint"):
        await got(kept)
    for spoilt in (raw[:-1] + b"!", None):
        await give(kept, raw, 3)
        (path,) = (tmp_path / FOLDER / PLAN).iterdir()
        spoil(path, spoilt)
        with pytest.raises(Refused, match="the checkpoint after step 3 is lost"):
            await got(kept)
        assert kept.of(0) is None


async def test_one_that_is_being_given_stays_as_it_is(tmp_path: Path) -> None:
    kept, first, second = Checkpoints(tmp_path, PLAN), content(tmp_path, 3), content(tmp_path, 4)
    await give(kept, first, 3)
    parts = kept.parts(0)
    found = (await anext(parts)).checkpoint
    await give(kept, second, 4)
    assert b"".join([part.piece async for part in parts]) == first
    assert found.step == 3


async def test_a_full_disk_is_said(tmp_path: Path) -> None:
    kept, raw = Checkpoints(tmp_path, PLAN), content(tmp_path, 3)
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(Refused, match="cannot keep it: Not a directory"):
        await give(kept, raw, 3)
