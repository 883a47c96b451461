from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pier_node.base.errors import PierError
from pier_node.engine import supervisor
from pier_node.engine import supervisor as module
from pier_node.engine.messages import Done, Evaluate, Evaluated, Failed, Hello, Job, Progress, Publishing, Setup
from pier_node.engine.supervisor import Answer, Moments, SharedMoments, Supervisor

SETUP = Setup("{}", "node-a", 0, 1, None, "cache", "outbox", "adam_m", "adam_v", 3)
JOB = Job(1, 0, 5, 4, "weights", "anchor", load_adam=False, adam_step=0)
LOADED = replace(JOB, load_adam=True)


def _done(job: Job, adam_step: int) -> Done:
    return Done(job.id, 100, 2.0, adam_step, 0.5, 0)


class Scene:
    """A supervisor and the one worker of its site, played by the test."""

    def __init__(self, folder: Path, stage: Any, saved: Moments | None) -> None:
        self.moments = SharedMoments(3, lambda: saved)
        self.supervisor = Supervisor(SETUP, self.moments, folder / "logs" / "workers.log", 1)
        self._stage = stage

    async def start(self) -> Any:
        """The first worker, set up."""
        starting = asyncio.create_task(self.supervisor.start())
        await self._stage.launched()
        worker = await self.enter()
        await starting
        return worker

    async def enter(self, attempt: int = 0) -> Any:
        """Another worker, set up."""
        worker = await self._stage.enter(Hello(0, 1, attempt, "cpu"))
        assert await worker.hear() == SETUP
        return worker

    def ask(self, request: Job | Evaluate, progress: Callable[[Progress], None] | None = None) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.supervisor.ask(request, progress))


Play = Callable[..., Scene]


@pytest.fixture
async def play(tmp_path: Path, stage: Any) -> AsyncIterator[Play]:
    scenes: list[Scene] = []

    def begin(saved: Moments | None = None) -> Scene:
        scenes.append(Scene(tmp_path, stage, saved))
        return scenes[-1]

    yield begin
    for scene in scenes:
        await scene.supervisor.stop()


async def test_a_request_is_answered(play: Play) -> None:
    scene, reports = play(), list[Progress]()
    worker = await scene.start()
    answer = scene.ask(JOB, reports.append)
    assert await worker.hear() == LOADED
    for message in (Progress(0, 3.0, 20, 0.1), Publishing(1), _done(JOB, 5)):
        worker.say(message)
    assert await answer == _done(JOB, 5)
    assert reports == [Progress(0, 3.0, 20, 0.1)]
    assert (scene.moments.step, scene.moments.torn) == (5, False)
    evaluation = scene.ask(Evaluate(2, "anchor"))
    assert await worker.hear() == Evaluate(2, "anchor")
    worker.say(Evaluated(2, 1.25))
    assert await evaluation == Evaluated(2, 1.25)


async def test_moments_are_loaded_once_and_when_the_caller_changed_them(play: Play) -> None:
    scene = play()
    worker = await scene.start()
    asked = [JOB, replace(JOB, id=2), replace(JOB, id=3, load_adam=True, adam_step=40), replace(JOB, id=4)]
    given = []
    for job in asked:
        answer = scene.ask(job)
        given.append(await worker.hear())
        worker.say(_done(job, given[-1].adam_step + 5))
        await answer
    assert [(job.load_adam, job.adam_step) for job in given] == [(True, 0), (False, 5), (True, 40), (False, 45)]


async def test_a_gradient_needs_no_moments(play: Play) -> None:
    scene = play()
    worker = await scene.start()
    gradient = replace(LOADED, payload="gradient", adam_step=7)
    answer = scene.ask(gradient)
    assert await worker.hear() == replace(gradient, load_adam=False)
    worker.say(Publishing(1))
    worker.say(_done(gradient, 0))
    await answer
    assert (scene.moments.step, scene.moments.torn) == (7, False)
    scene.ask(replace(JOB, id=2))
    assert await worker.hear() == replace(JOB, id=2, load_adam=True, adam_step=7)


async def test_after_a_death_the_job_begins_again(play: Play) -> None:
    scene = play()
    first = await scene.start()
    answer = scene.ask(JOB)
    await first.hear()
    first.say(_done(JOB, 5))
    await answer
    again = replace(JOB, id=2)
    answer = scene.ask(again)
    assert await first.hear() == replace(again, load_adam=False, adam_step=5)
    first.die()
    second = await scene.enter(attempt=1)
    assert await second.hear() == replace(again, load_adam=True, adam_step=5)
    second.say(_done(again, 10))
    assert await answer == _done(again, 10)


@pytest.mark.parametrize(
    ("saved", "step", "first"),
    [((np.full(3, 2.0, np.float32), np.zeros(3, np.float32), 4), 4, 2.0), (None, 0, 0.0)],
)
async def test_torn_moments_are_restored_before_the_job_begins_again(
    play: Play, caplog: pytest.LogCaptureFixture, saved: Moments | None, step: int, first: float
) -> None:
    scene = play(saved)
    worker = await scene.start()
    scene.ask(JOB)
    await worker.hear()
    scene.moments.first.array[:2] = 99.0
    worker.say(Publishing(1))
    worker.die()
    with caplog.at_level(logging.ERROR):
        second = await scene.enter(attempt=1)
        assert await second.hear() == replace(LOADED, adam_step=step)
    assert scene.moments.first.array.tolist() == [first] * 3
    assert "writing AdamW's moments" in caplog.text


async def test_a_late_answer_to_an_earlier_job_is_none(play: Play) -> None:
    scene = play()
    worker = await scene.start()
    answer = scene.ask(replace(JOB, id=2))
    await worker.hear()
    for message in (_done(JOB, 3), Evaluated(2, 1.0), _done(replace(JOB, id=2), 5)):
        worker.say(message)
    assert await answer == _done(replace(JOB, id=2), 5)


async def test_an_error_of_a_worker_is_the_callers(play: Play) -> None:
    scene = play()
    worker = await scene.start()
    answer = scene.ask(JOB)
    worker.say(Failed("no text in corpus/", "Add some."))
    with pytest.raises(PierError, match="no text") as caught:
        await answer
    assert caught.value.remedy == "Add some."


async def test_workers_that_never_start_are_explained_with_their_log(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "launcher", lambda *_: ["sh", "-c", "echo no driver >&2; exit 3"])
    with pytest.raises(PierError, match="exit code 3") as caught:
        await play().supervisor.start()
    assert "no driver" in caught.value.problem
    assert str(tmp_path / "logs" / "workers.log") in caught.value.problem


async def test_after_a_finished_job_a_dead_launcher_is_replaced(play: Play, stage: Any) -> None:
    scene = play()
    worker = await scene.start()
    answer = scene.ask(JOB)
    await worker.hear()
    worker.say(_done(JOB, 5))
    await answer
    answer, old = scene.ask(replace(JOB, id=2)), scene.supervisor._group
    assert old is not None
    assert old._process is not None
    old._process.kill()
    worker.die()
    await stage.launched()
    second = await scene.enter()
    assert await second.hear() == replace(JOB, id=2, load_adam=True, adam_step=5)
    second.say(_done(replace(JOB, id=2), 10))
    await answer
    assert not old.home.exists()


async def test_silence_has_an_end(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.2)
    scene = play()
    await scene.start()
    with pytest.raises(PierError, match="said nothing"):
        await scene.supervisor.ask(JOB)
