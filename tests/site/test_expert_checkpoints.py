"""Checkpoints between a site and its coordinator, which is played. Over the wire:
coordinator/experts/test_execution_checkpoints.py."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator.expert_cases import accepted_job
from simulation.virtual_time import run

from pier_node.experts.resume import FILE, Kept, ResumeState, most_bytes
from pier_node.site.coordinator.link import NoLease, Refused, Unreachable
from pier_node.site.expert_checkpoints import PATIENCE, REFUSALS, SHARE, ExpertCheckpoints, JobCheckpoints
from pier_proto.v1.coordinator_pb2 import CheckpointPart, ExpertCheckpoint

PLAN, NAME, LENGTH = "ab" * 16, "cd" * 16, 5
JOB = accepted_job(1, "lab-0").job


def saved(folder: Path, step: int, value: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    ResumeState(step, step, *(np.full(LENGTH, value, dtype=np.float32) for _ in range(3))).save(folder, NAME)
    return folder / FILE


class Played:
    """A coordinator: giving takes `seconds`; `problems` are what the next calls meet; `has` is what it keeps."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Kept, bytes]] = []
        self.seconds = 0.0
        self.problems: list[Exception] = []
        self.has, self.asked = b"", 0
        self.breaks_after, self.starts = 1 << 40, list[int]()
        self.about = Kept(job=1, step=1, size=1, digest="0" * 64)

    async def give_checkpoint(self, plan: str, kept: Kept, file: BufferedReader) -> None:
        await asyncio.sleep(self.seconds)
        if self.problems:
            raise self.problems.pop(0)
        file.seek(0)
        self.given.append((plan, kept, file.read()))

    async def fetch_checkpoint(
        self, plan: str, kept: Kept, digest: str = "", offset: int = 0
    ) -> AsyncGenerator[CheckpointPart]:
        self.asked += 1
        if self.problems:
            raise self.problems.pop(0)
        start = offset if digest == self.about.digest else 0
        self.starts.append(start)
        yield CheckpointPart(checkpoint=ExpertCheckpoint(**self.about.model_dump()), offset=start)
        for at in range(start, len(self.has), 64):
            if at - start >= self.breaks_after:
                raise Unreachable("the line broke")
            yield CheckpointPart(piece=self.has[at : at + 64])

    def keeps(self, path: Path, step: int) -> Kept:
        """Another site gave it this one, and that is what the order said."""
        self.has = path.read_bytes()
        self.about = Kept(job=1, step=step, size=len(self.has), digest=hashlib.sha256(self.has).hexdigest())
        return self.about


class Site:
    def __init__(self) -> None:
        self.coordinator = Played()
        line: Any = self.coordinator
        self.checkpoints = ExpertCheckpoints(line, lambda: asyncio.get_running_loop().time())

    def of(self, kept: Kept | None = None, followed: bool = False) -> JobCheckpoints:
        return self.checkpoints.of(PLAN, JOB, kept, followed)


def test_a_checkpoint_is_given_as_it_was_when_it_was_saved(tmp_path: Path) -> None:
    site = Site()

    async def story() -> None:
        site.coordinator.seconds = 5.0
        path = saved(tmp_path, 10)
        before = path.read_bytes()
        site.of().saved(path, 10)
        saved(tmp_path, 20, 2.0)
        await asyncio.sleep(6.0)
        ((plan, kept, content),) = site.coordinator.given
        assert (plan, kept.job, kept.step, kept.size, content) == (PLAN, 1, 10, len(before), before)
        assert kept.digest == hashlib.sha256(before).hexdigest()

    run(story())


def test_giving_takes_a_twentieth_of_the_time(tmp_path: Path) -> None:
    site, path, long = Site(), saved(tmp_path, 10), JOB.model_copy(update={"steps": 2000})

    async def story() -> None:
        site.coordinator.seconds = 10.0
        for step in range(1, 1001):  # one is saved every second
            site.checkpoints.of(PLAN, long, None, False).saved(path, step)
            await asyncio.sleep(1.0)
        await site.checkpoints.end()
        steps = [kept.step for _, kept, _ in site.coordinator.given]
        assert steps == [1, 201, 401, 601, 801]
        assert len(steps) * 10.0 / 1000 == SHARE

    run(story())


def test_what_is_not_taken_takes_its_time_as_well_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site, path = Site(), saved(tmp_path, 10)
    caplog.set_level(logging.INFO)

    async def story() -> None:
        site.coordinator.seconds = 1.0
        site.coordinator.problems = [Unreachable("gone"), Refused("no such plan"), NoLease("unknown")]
        for step in (10, 30, 50, 70):
            site.of().saved(path, step)
            await asyncio.sleep(20.5)
        assert [kept.step for _, kept, _ in site.coordinator.given] == [70]

    run(story())
    levels = [record.levelno for record in caplog.records if "checkpoint at step" in record.message]
    assert levels == [logging.INFO, logging.WARNING, logging.INFO]  # a library that others import renames the levels


def test_what_is_on_its_way_ends_with_the_job(tmp_path: Path) -> None:
    site, path = Site(), saved(tmp_path, 10)

    async def story() -> None:
        site.coordinator.seconds = 100.0
        site.of().saved(path, 10)
        await asyncio.sleep(50.0)
        await site.checkpoints.drop()
        await site.checkpoints.drop()
        await asyncio.sleep(100.0)
        assert site.coordinator.given == []
        await asyncio.sleep(50 * (1 / SHARE - 1))
        site.coordinator.seconds = 1.0
        site.of().saved(path, 20)
        await asyncio.sleep(2.0)
        assert len(site.coordinator.given) == 1

    run(story())


def test_the_last_one_is_given_only_if_another_expert_branches_from_it(tmp_path: Path) -> None:
    site, path = Site(), saved(tmp_path, JOB.steps)

    async def story() -> None:
        site.of().saved(path, JOB.steps)
        await asyncio.sleep(1.0)
        assert site.coordinator.given == []
        site.of(followed=True).saved(path, JOB.steps)
        await asyncio.sleep(1.0)
        assert [kept.step for _, kept, _ in site.coordinator.given] == [JOB.steps]

    run(story())


def test_a_last_one_comes_after_what_is_on_its_way_and_before_what_follows(tmp_path: Path) -> None:
    site, path = Site(), saved(tmp_path / "work", 50)

    async def story() -> None:
        site.coordinator.seconds = 30.0
        site.of().saved(path, 50)
        site.of(followed=True).saved(saved(tmp_path / "work", JOB.steps), JOB.steps)
        site.of(followed=True).saved(saved(tmp_path / "work", JOB.steps, 2.0), JOB.steps)
        path.unlink()
        await site.checkpoints.drop()
        await asyncio.sleep(59.0)
        site.of().saved(saved(tmp_path / "next", 10), 10)
        await asyncio.sleep(100.0)
        assert [kept.step for _, kept, _ in site.coordinator.given] == [50, JOB.steps, JOB.steps]
        await asyncio.sleep(30 * (1 / SHARE - 1))
        site.of().saved(tmp_path / "next" / FILE, 10)
        await asyncio.sleep(31.0)
        assert site.coordinator.given[-1][1].step == 10

    run(story())


def test_a_last_one_is_tried_until_the_coordinator_has_answered_or_all_ends(tmp_path: Path) -> None:
    site, path = Site(), saved(tmp_path, JOB.steps)

    async def story() -> None:
        site.coordinator.problems = [Unreachable("gone"), NoLease("unknown"), Refused("another is on its way")]
        site.of(followed=True).saved(path, JOB.steps)
        await asyncio.sleep(60.0)
        assert len(site.coordinator.given) == 1
        site.coordinator.problems = [Refused("no such plan")] * REFUSALS + [Unreachable("gone"), OSError("stale")]
        site.of(followed=True).saved(path, JOB.steps)
        await asyncio.sleep(300.0)
        assert len(site.coordinator.problems) == 2, "no is an answer, in the end"
        site.of(followed=True).saved(path, JOB.steps)
        await asyncio.sleep(300.0)
        assert site.coordinator.problems == [], "and who cannot read it cannot give it"
        assert len(site.coordinator.given) == 1

    run(story())


def test_while_a_last_one_waits_for_its_next_try_others_are_given_and_at_the_end_none(tmp_path: Path) -> None:
    site, path = Site(), saved(tmp_path, JOB.steps)

    async def story() -> None:
        site.coordinator.seconds, site.coordinator.problems = 10.0, [Unreachable("gone")]
        site.of(followed=True).saved(path, JOB.steps)
        site.of(followed=True).saved(path, JOB.steps)
        await asyncio.sleep(11.0)
        assert site.coordinator.problems == []
        await asyncio.sleep(10.0 * (1 / SHARE - 1) - 2.0)
        assert site.coordinator.given == [], "a line that breaks each time is not used all the time"
        site.checkpoints._due = 0.0
        site.of().saved(path, 10)
        await asyncio.sleep(10.5)
        assert [kept.step for _, kept, _ in site.coordinator.given] == [10]
        await asyncio.sleep(10.0)
        assert [kept.step for _, kept, _ in site.coordinator.given] == [10, JOB.steps]
        await site.checkpoints.end()
        await asyncio.sleep(1000.0)
        assert len(site.coordinator.given) == 2

    run(story())


def test_a_job_from_elsewhere_goes_on_from_its_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    site = Site()
    kept = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)
    here = tmp_path / "here"
    saved(here, 10)

    async def story() -> None:
        assert await site.of(kept).fetched(here, NAME, LENGTH, 10)

    run(story())
    found = ResumeState.load(here, NAME, LENGTH)
    assert found is not None
    assert found.step == 30
    assert caplog.messages == ["the expert of network resumed at step 30 from its checkpoint"]
    assert [path.name for path in here.iterdir()] == [FILE]


def test_one_that_is_interrupted_goes_on_where_it_stopped_for_as_long_as_it_gets_further(tmp_path: Path) -> None:
    site, here = Site(), tmp_path / "here"
    kept = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)
    site.coordinator.breaks_after = 64
    here.mkdir()

    async def story() -> None:
        assert await site.of(kept).fetched(here, NAME, LENGTH, 0)

    run(story())
    assert site.coordinator.starts == [*range(0, kept.size, 64)]
    assert (here / FILE).read_bytes() == site.coordinator.has
    assert [path.name for path in here.iterdir()] == [FILE]


def test_one_that_another_has_replaced_meanwhile_is_fetched_from_its_beginning(tmp_path: Path) -> None:
    site, here = Site(), tmp_path / "here"
    site.coordinator.breaks_after = 128
    here.mkdir()

    async def story() -> None:
        kept = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)
        fetching = asyncio.create_task(site.of(kept).fetched(here, NAME, LENGTH, 0))
        await asyncio.sleep(0.1)
        site.coordinator.keeps(saved(tmp_path / "there", 40, 2.0), 40)
        assert await fetching

    run(story())
    assert site.coordinator.starts[:3] == [0, 0, 128]
    assert (here / FILE).read_bytes() == site.coordinator.has


def test_a_site_that_was_stopped_has_what_had_arrived(tmp_path: Path) -> None:
    site, here = Site(), tmp_path / "here"
    kept = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)
    here.mkdir()

    async def story() -> None:
        site.coordinator.breaks_after = 192
        fetching = asyncio.create_task(site.of(kept).fetched(here, NAME, LENGTH, 0))
        await asyncio.sleep(0.1)
        fetching.cancel()
        await asyncio.wait([fetching])
        assert not (here / FILE).exists()
        site.coordinator.breaks_after = 1 << 40
        assert await Site.of(site, kept).fetched(here, NAME, LENGTH, 0)

    run(story())
    assert site.coordinator.starts == [0, 192]
    assert [path.name for path in here.iterdir()] == [FILE]


def test_a_later_one_than_the_order_said_is_as_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    site = Site()
    old = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)
    site.coordinator.keeps(saved(tmp_path / "there", 40), 40)

    async def story() -> None:
        assert await site.of(old).fetched(tmp_path, NAME, LENGTH, 0)

    run(story())
    assert caplog.messages == ["the expert of network resumed at step 40 from its checkpoint"]


@pytest.mark.parametrize(("step", "used"), [(99, True), (100, True), (101, False)])
def test_one_that_is_beyond_the_expert_s_steps_is_not_used(tmp_path: Path, step: int, used: bool) -> None:
    site = Site()
    kept = site.coordinator.keeps(saved(tmp_path / "there", step), step)

    async def story() -> None:
        assert await site.of(kept).fetched(tmp_path, NAME, LENGTH, 0) is used

    run(story())
    assert (tmp_path / FILE).exists() is used


@pytest.mark.parametrize("own", [30, 31])
def test_a_site_uses_its_own_if_that_is_as_late(tmp_path: Path, own: int) -> None:
    site = Site()
    kept = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)

    async def story() -> None:
        assert not await site.of(kept).fetched(tmp_path, NAME, LENGTH, own)
        assert not await site.of().fetched(tmp_path, NAME, LENGTH, 0)

    run(story())
    assert site.coordinator.asked == 0


def spoilt(site: Site, tmp_path: Path, how: str) -> Kept:
    """What the order says, when something else comes."""
    path = saved(tmp_path / "there", 30, np.nan if how == "non-finite" else 1.0)
    kept = site.coordinator.keeps(path, 30)
    if how == "truncated":
        site.coordinator.has = site.coordinator.has[:-1]
    elif how == "other bytes":
        site.coordinator.has = site.coordinator.has[:-1] + b"!"
    elif how == "more bytes":
        site.coordinator.has += b"?"
    elif how == "far too many":
        site.coordinator.has = bytes(most_bytes(LENGTH) + 1)
        site.coordinator.about = kept.model_copy(update={"size": 1 << 40})
    elif how == "another step":
        site.coordinator.about = kept.model_copy(update={"step": 31})
    elif how == "no checkpoint at all":
        path.write_bytes(b"noise")
        site.coordinator.keeps(path, 30)
    return kept


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "hash is not that of the"),
        ("other bytes", "hash is not that of the"),
        ("more bytes", "more than the [0-9]+ bytes"),
        ("far too many", "bytes: one of that expert has 4156 at most"),
        ("non-finite", "has values that no training gives"),
        ("another step", "not one after step 31"),
        ("no checkpoint at all", "[Hh]eader"),
    ],
)
def test_what_does_not_check_is_not_used_and_the_expert_begins_again(
    tmp_path: Path, how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    site, here = Site(), tmp_path / "here"
    kept = spoilt(site, tmp_path, how)
    here.mkdir()

    async def story() -> None:
        assert not await site.of(kept).fetched(here, NAME, LENGTH, 0)

    run(story())
    assert [*here.iterdir()] == []
    (said_so,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said_so.message.startswith("the expert of network begins again: its checkpoint cannot be used: ")
    assert re.search(said, said_so.message)


@pytest.mark.parametrize(("name", "length"), [("ef" * 16, LENGTH), (NAME, LENGTH + 1)])
def test_that_of_another_expert_is_not_used(tmp_path: Path, name: str, length: int) -> None:
    site = Site()
    kept = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)

    async def story() -> None:
        assert not await site.of(kept).fetched(tmp_path, name, length, 0)

    run(story())


def test_a_coordinator_that_is_away_is_waited_for_and_not_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site()
    kept = site.coordinator.keeps(saved(tmp_path / "there", 30), 30)

    async def story() -> None:
        site.coordinator.problems = [Unreachable("gone"), NoLease("unknown"), Unreachable("gone")]
        assert await site.of(kept).fetched(tmp_path, NAME, LENGTH, 0)
        site.coordinator.problems = [Unreachable("gone")] * 1000
        began = asyncio.get_running_loop().time()
        assert not await site.of(kept).fetched(tmp_path, NAME, LENGTH, 20)
        assert PATIENCE <= asyncio.get_running_loop().time() - began < PATIENCE + 10
        site.coordinator.problems = [Refused("no checkpoint of that expert is kept")]
        assert not await site.of(kept).fetched(tmp_path, NAME, LENGTH, 0)

    run(story())
    assert "the expert of network continues at step 20: its checkpoint cannot be used: gone" in caplog.text
    assert "begins again: its checkpoint cannot be used: no checkpoint of that expert is kept" in caplog.text
