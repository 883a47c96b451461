"""The daemon's end of a program: what it is asked for, programs that die or hang. They are played by the test."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.base.toml import validated
from pier_node.config.run import RunConfig
from pier_node.engine import program as module
from pier_node.engine import training_process
from pier_node.engine.messages import (
    LINE_LIMIT,
    VERSION,
    Ability,
    Attach,
    Attached,
    Done,
    Enough,
    Evaluate,
    Evaluated,
    Failed,
    Left,
    Logged,
    Message,
    Opened,
    Progress,
    Publish,
    Publishing,
    Rate,
    Rated,
    Ready,
    Train,
    decode,
    encode,
)
from pier_node.engine.moments import Moments
from pier_node.engine.program import Patience, Program, RunView
from pier_node.engine.ranks import PID, STEPS, enter
from pier_node.engine.training_process import Command

TENSORS = ["weight 2x3"]
CONFIG = validated(
    {
        "program": {"step_tokens": 8, "tensors": TENSORS},
        "inner": {"total_steps": 100},
        "outer": {"algorithm": "diloco", "inner_steps": 10},
    },
    RunConfig,
    "a test",
)
VIEW = RunView(3, 2, {"lab-b": 2.5})


class Actor:
    """A program of `ranks` ranks, of which this process is rank 0."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, message: Message) -> None:
        self._writer.write(encode(message))

    def write(self, line: bytes) -> None:
        self._writer.write(line)

    async def hear(self) -> Message | None:
        try:
            line = await asyncio.wait_for(self._reader.readline(), 60)
        except ConnectionResetError:
            return None
        return decode(line) if line else None

    def die(self) -> None:
        self._writer.close()


async def connected(folder: Path) -> Actor:
    """A program that has connected."""
    while True:
        try:
            return Actor(*await asyncio.open_unix_connection(folder / "socket"))
        except OSError:
            await asyncio.sleep(0.01)


class Scene:
    """A daemon's end of a program that has been started by somebody else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program = folder, Program(folder / "socket", None)
        self.training: asyncio.Task[Done] | None = None
        self.logged: list[Logged] = []
        self.steps: list[Progress] = []

    async def enter(self, patience: float, ranks: int = 1) -> tuple[Actor, Attached]:
        """A program that attaches, and is ready to train."""
        listening = asyncio.create_task(self.program.attached())
        actor = await connected(self.folder)
        actor.say(Attach(VERSION, TENSORS, 8, "", ranks, patience, []))
        await listening
        self.program.check(CONFIG)
        self.program.place(CONFIG, 0, 1, self.folder, lambda: VIEW)
        self.program.on_log = self.logged.append
        starting = asyncio.create_task(self.program.start())
        place = await actor.hear()
        assert isinstance(place, Attached)
        actor.say(Ready())
        await starting
        return actor, place

    def train(self) -> asyncio.Task[Done]:
        work = self.program.run(0, 100, 1, "weights", SharedVector(6), on_progress=self.steps.append)
        self.training = asyncio.create_task(work)
        return self.training


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    for name in ("LOOK_SECONDS", "DEAD_SECONDS", "LEAVE_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)
    scene = Scene(tmp_path)
    yield scene
    await scene.program.stop()


async def steps(actor: Actor, count: int) -> int:
    """Hear what to train, and report some steps; returns the job."""
    train = await actor.hear()
    assert isinstance(train, Train)
    for step in range(count):
        actor.say(Progress(step, 2.0, 8, 0.1))
        await asyncio.sleep(0.01)
    return train.id


async def test_a_program_that_falls_silent_after_quick_steps_ends_its_site_with_words(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    actor, place = await scene.enter(patience=60)
    row = enter(place.table, 1, 0)
    training = scene.train()
    await steps(actor, 12)
    row[STEPS] = 12
    await seen(lambda: len(scene.steps) == 12)
    clock[0] = 61.0
    with pytest.raises(PierError, match=r"hangs: it has said nothing for 60 seconds, and it is in its step 13") as told:
        await training
    assert "patience" in told.value.remedy


async def test_a_program_is_told_when_its_steps_are_enough(scene: Scene) -> None:
    actor, _ = await scene.enter(patience=600)
    scene.program.enough()  # it does nothing yet
    training = scene.train()
    job = await steps(actor, 2)
    scene.program.enough()
    assert await actor.hear() == Enough(job)
    actor.say(Done(job, 2, 16, 0, 0.5, 0))
    assert (await training).steps == 2


async def test_before_its_steps_are_known_a_program_may_be_silent_for_long(scene: Scene) -> None:
    actor, place = await scene.enter(patience=0.02)
    enter(place.table, 1, 0)
    training = scene.train()
    job = await steps(actor, 3)
    await asyncio.sleep(0.3)
    actor.say(Publishing(job))
    actor.say(Done(job, 1, 8, 0, 0.5, 0))
    assert (await training).tokens == 8


async def test_a_rank_that_dies_alone_is_named_within_seconds(scene: Scene) -> None:
    actor, place = await scene.enter(patience=600, ranks=2)
    enter(place.table, 2, 0)
    other = await asyncio.create_subprocess_exec("sleep", "600")
    enter(place.table, 2, 1)[PID] = other.pid
    training = scene.train()
    await steps(actor, 1)
    await asyncio.sleep(0.1)
    assert not training.done()
    other.kill()
    await other.wait()
    with pytest.raises(PierError, match=rf"hangs: rank 1 \(process {other.pid}\) has died"):
        await training


async def test_a_program_hears_how_the_run_stands_and_may_log_metrics(scene: Scene) -> None:
    actor, _ = await scene.enter(patience=600)
    training = scene.train()
    train = await actor.hear()
    assert isinstance(train, Train)
    assert (train.round, train.sites, train.losses) == (3, 2, {"lab-b": 2.5})
    told = Logged(7, {"accuracy": 0.5, "stage": "warm"})
    actor.say(told)
    actor.say(Done(train.id, 1, 8, 0, 0.5, 0))
    assert (await training).tokens == 8
    assert scene.logged == [told]


@pytest.mark.parametrize(
    "metrics",
    [
        {"accuracy": math.nan},
        {"accuracy": math.inf},
        {"stage": "x" * 201},
        {"a name": [1.0]},
        {"../name": 1.0},
        {"name\n": 1.0},
        {"x" * 65: 1.0},
        {f"name {index}": 1.0 for index in range(65)},
    ],
)
async def test_a_program_that_logs_more_than_it_may_ends_its_site_with_words(
    scene: Scene, metrics: dict[str, Any]
) -> None:
    actor, _ = await scene.enter(patience=600)
    training = scene.train()
    assert isinstance(await actor.hear(), Train)
    actor.write(json.dumps({"kind": "Logged", "step": 1, "metrics": metrics}).encode() + b"\n")
    with pytest.raises(PierError, match="broke the protocol"):
        await training
    assert not scene.logged


def silent(doing: Message, gaps: list[float], monkeypatch: pytest.MonkeyPatch, floor: float = 1.0) -> Patience:
    """After `gaps` seconds between messages like `doing`."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    patience = Patience(floor)
    patience.said(doing)
    for gap in gaps:
        clock[0] += gap
        patience.said(doing)
    return patience


STEP = Progress(1, 2.0, 8, 0.1, 0.5)


def test_patience_is_learned_from_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = silent(STEP, [10.0, 12.0] * 8, monkeypatch)
    assert patience.seconds() == 11.0 + 6 * 1.0
    patience.double()
    assert patience.seconds() == 2 * 17.0
    patience.forget(1.0)
    assert patience.seconds() == 2 * module.FIRST_SECONDS


def test_patience_has_a_floor_and_what_is_rare_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = silent(STEP, [0.5] * 20, monkeypatch, floor=300.0)
    assert patience.seconds() == 300.0
    patience.said(Publishing(1))
    assert patience.seconds() == module.FIRST_SECONDS


def test_no_time_counts_while_the_daemon_has_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = silent(STEP, [0.5] * 20, monkeypatch)
    patience.said(Done(1, 1, 8, 0, 0.5, 0))
    assert patience.seconds() == module.FIRST_SECONDS


async def done_by(program: Program, folder: Path) -> Done:
    """What a program says of its first inner steps, however often it has to be started for them."""
    await program.attached()
    program.place(CONFIG, 0, 1, folder)
    await program.start()
    return await asyncio.wait_for(program.run(0, 12, 1, "weights", SharedVector(6)), 60)


async def test_a_hung_command_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "DUMP_SECONDS", "LEAVE_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(training_process, "RESTART_SECONDS", 0.02)
    program = Program(None, Command((sys.executable, str(Path(__file__).with_name("hanging_program.py")))))
    monkeypatch.setenv("HANG_ONCE", str(tmp_path / "hung"))
    try:
        done = await done_by(program, tmp_path)
    finally:
        await program.stop()
    assert done.tokens == 8
    first = int((tmp_path / "hung").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(first, signal.SIGCONT)


async def test_a_child_of_a_killed_program_does_not_keep_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training_process, "RESTART_SECONDS", 0.02)
    program = Program(None, Command((sys.executable, str(Path(__file__).with_name("hanging_program.py")))))
    monkeypatch.setenv("HANG_ONCE", str(tmp_path / "hung"))
    monkeypatch.setenv("LEAVE_CHILD", str(tmp_path / "child"))
    try:
        done = await done_by(program, tmp_path)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        await program.stop()
    assert done.tokens == 8
    assert caplog.text.count("it is started again") == 1


async def test_a_program_that_keeps_its_optimizer_is_not_asked_for_more(scene: Scene, tmp_path: Path) -> None:
    actor, _ = await scene.enter(patience=600)
    assert math.isnan(await scene.program.evaluate(SharedVector(6)))
    assert scene.program.moments() is None
    with pytest.raises(PierError, match="not gradients"):
        await scene.program.run(0, 1, 1, "gradient", SharedVector(6))
    with pytest.raises(PierError, match="cannot rate"):
        await scene.program.rate(SharedVector(6), tmp_path / "rows.npy")
    actor.die()


async def test_a_second_program_is_refused(scene: Scene) -> None:
    first, _ = await scene.enter(patience=600)
    second = await connected(scene.folder)
    second.say(Attach(VERSION, TENSORS, 8, "", 1, 600, []))
    failed = await second.hear()
    assert isinstance(failed, Failed)
    assert "another program is attached" in failed.problem
    scene.train()
    assert isinstance(await first.hear(), Train)


async def test_other_step_tokens_than_the_runs_are_warned_of(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    listening = asyncio.create_task(scene.program.attached())
    (await connected(scene.folder)).say(Attach(VERSION, TENSORS, 8, "", 1, 600, []))
    await listening
    for tokens in (8, 16):
        tables = {"step_tokens": tokens, "tensors": TENSORS}
        scene.program.check(RunConfig.model_validate({"program": tables, "outer": {"start": "none"}}))
        assert ("step_tokens is 8 here and 16 in the run" in caplog.text) is (tokens == 16)


async def test_a_program_of_another_version_is_refused(scene: Scene) -> None:
    listening = asyncio.create_task(scene.program.attached())
    (await connected(scene.folder)).say(Attach(VERSION - 1, TENSORS, 8, "", 1, 600, []))
    with pytest.raises(PierError, match=f"version {VERSION - 1}, this daemon {VERSION}"):
        await listening


# --- a program that can do all: Pier's own trainer ---------------------------------------------

OWN = RunConfig.model_validate({"model": {"preset": "llama-tiny"}})
ALL: list[Ability] = ["gradient", "moments", "evaluate", "rate"]


def _done(id: int, adam_step: int) -> Done:
    return Done(id, 3, 100, adam_step, 0.5, 0)


class Own:
    """A daemon's end of a program that it starts; what starts does nothing, and the program is played by the test."""

    def __init__(self, folder: Path, saved: Moments | None) -> None:
        self.folder = folder
        command = Command(("sh", "-c", "echo no driver for $$; exec sleep 600"), log=folder / "logs" / "workers.log")
        self.program = Program(folder / "socket", command)
        self.program.place(OWN, 0, 1, folder)
        self.program.recover_moments = lambda: saved
        self.load = SharedVector(len(self.program.outbox.array))

    async def start(self) -> Actor:
        """The first program, which is ready."""
        starting = asyncio.create_task(self.program.start())
        actor = await self.enter()
        await starting
        return actor

    async def enter(self) -> Actor:
        """Another program, which is ready."""
        actor = await connected(self.folder)
        await self.attach(actor)
        return actor

    async def attach(self, actor: Actor) -> None:
        actor.say(Attach(VERSION, ["weight 2x3"], 8, "", 1, 600, ALL))
        place = await actor.hear()
        assert isinstance(place, Attached)
        assert place.adam_m == self.program.adam_m.path
        actor.say(Ready())

    def ask(self, adam_step: int | None = None, told: Any = None, publish: Any = "weights") -> asyncio.Task[Done]:
        return asyncio.create_task(self.program.run(0, 5, 4, publish, self.load, adam_step, told))

    def train(self, id: int, moments: int | None) -> Train:
        """What the program hears."""
        return Train(id, 0, 5, self.load.path, forget=False, round=0, sites=1, losses={}, sequences=4, moments=moments)

    async def started(self) -> psutil.Process:
        """What the daemon has started."""
        log = self.folder / "logs" / "workers.log"
        async with asyncio.timeout(60):
            while not (log.exists() and log.read_text().endswith("\n")):  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.02)
        return psutil.Process(int(log.read_text().split()[-1]))


Play = Callable[..., Own]


@pytest.fixture
async def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    for name in ("CLOSE_SECONDS", "LEAVE_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(training_process, "RESTART_SECONDS", 0.02)
    monkeypatch.setattr(training_process, "GIVE_UP_SECONDS", 0.02)
    scenes: list[Own] = []

    def begin(saved: Moments | None = None) -> Own:
        scenes.append(Own(tmp_path, saved))
        return scenes[-1]

    yield begin
    for scene in scenes:
        await scene.program.stop()


async def test_requests_are_answered(play: Play, tmp_path: Path) -> None:
    scene, reports = play(), list[Progress]()
    actor = await scene.start()
    answer = scene.ask(told=reports.append)
    assert await actor.hear() == scene.train(1, moments=0)
    for message in (Opened(90, 10), STEP, Publishing(1)):
        actor.say(message)
    assert await actor.hear() == Publish()
    actor.say(_done(1, 5))
    assert await answer == _done(1, 5)
    assert reports == [STEP]
    assert await scene.program.opened() == Opened(90, 10)
    assert scene.program.moments() == (scene.program.adam_m, scene.program.adam_v, 5)
    evaluation = asyncio.create_task(scene.program.evaluate(scene.load))
    assert await actor.hear() == Evaluate(2, scene.load.path)
    actor.say(Evaluated(2, 1.25))
    assert await evaluation == 1.25
    rating = asyncio.create_task(scene.program.rate(scene.load, tmp_path / "rows.npy"))
    assert await actor.hear() == Rate(3, scene.load.path, str(tmp_path / "rows.npy"))
    actor.say(Rated(3, [1.0, 2.0]))
    assert (await rating).tolist() == [1.0, 2.0]


async def test_a_program_that_is_back_does_not_publish_over_what_the_one_before_it_has_learned(play: Play) -> None:
    scene, told = play(), list[bool]()
    scene.program.place(CONFIG, 0, 1, scene.folder)
    starting = asyncio.create_task(scene.program.start())
    for ready in (False, True, True):
        actor = await connected(scene.folder)
        actor.say(Attach(VERSION, TENSORS, 8, "", 1, 600, []))
        place = await actor.hear()
        assert isinstance(place, Attached)
        told.append(place.publish)
        if ready:
            actor.say(Ready())
            await starting
        actor.die()
    assert told == [True, True, False], "the first one had not published yet"


async def test_a_disk_without_room_for_the_moments_is_said_before_anything_starts(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PierError, match="No space left on device") as caught:
        play()
    assert caught.value.remedy.startswith("Free some space")


async def test_moments_are_not_published_while_they_are_saved(play: Play) -> None:
    scene = play()
    actor = await scene.start()
    answer = scene.ask()
    await actor.hear()
    async with scene.program.moments_unchanged():
        async with scene.program.moments_unchanged():
            actor.say(Publishing(1))
        early = asyncio.create_task(actor.hear())
        await asyncio.sleep(0.05)
        assert not early.done()
    assert await early == Publish()
    actor.say(_done(1, 5))
    assert await answer == _done(1, 5)


async def test_weights_are_published_without_moments_whoever_reads_those(play: Play) -> None:
    scene = play()
    actor = await scene.start()
    scene.program.publishes_moments = False
    answer = scene.ask()
    await actor.hear()
    async with scene.program.moments_unchanged():
        actor.say(Publishing(1))
        assert await actor.hear() == Publish(moments=False)
        actor.say(_done(1, 5))
        assert await answer == _done(1, 5)


async def test_moments_are_loaded_once_and_when_the_caller_changed_them(play: Play) -> None:
    scene = play()
    actor, given = await scene.start(), list[int | None]()
    for adam_step in (None, None, 40, None):
        answer, before = scene.ask(adam_step), scene.program.moments()
        train = await actor.hear()
        assert isinstance(train, Train)
        given.append(train.moments)
        actor.say(_done(train.id, (adam_step or (before[2] if before else 0)) + 5))
        await answer
    assert given == [0, None, 40, None]


async def test_a_gradient_needs_no_moments(play: Play) -> None:
    scene = play()
    actor = await scene.start()
    answer = scene.ask(7, publish="gradient")
    train = await actor.hear()
    assert isinstance(train, Train)
    assert (train.publish, train.moments) == ("gradient", None)
    actor.say(Publishing(1))
    actor.say(_done(1, 0))
    await answer
    moments = scene.program.moments()
    assert moments
    assert moments[2] == 7
    scene.ask()
    assert await actor.hear() == scene.train(2, moments=7)


async def test_after_a_death_the_steps_begin_again(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    scene = play()
    first = await scene.start()
    answer = scene.ask()
    await first.hear()
    first.say(_done(1, 5))
    await answer
    answer = scene.ask()
    assert await first.hear() == scene.train(2, moments=None)
    first.die()
    with caplog.at_level(logging.WARNING):
        second = await scene.enter()
    assert await second.hear() == scene.train(2, moments=5)
    second.say(_done(2, 10))
    assert await answer == _done(2, 10)
    assert "a worker died" in caplog.text


@pytest.mark.parametrize(
    ("saved", "step", "first"),
    [((np.float32(2.0), np.float32(0.0), 4), 4, 2.0), (None, 0, 0.0)],
)
async def test_torn_moments_are_restored_before_the_steps_begin_again(
    play: Play, caplog: pytest.LogCaptureFixture, saved: Any, step: int, first: float
) -> None:
    scene = play(saved)
    actor = await scene.start()
    scene.ask()
    await actor.hear()
    scene.program.adam_m.array[:2] = 99.0
    actor.say(Publishing(1))
    assert await actor.hear() == Publish()
    actor.die()
    with caplog.at_level(logging.ERROR):
        second = await scene.enter()
        assert await second.hear() == scene.train(1, moments=step)
    assert (scene.program.adam_m.array == first).all()
    assert "writing AdamW's moments" in caplog.text


async def test_the_last_words_of_a_program_come_before_the_next_one(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLLOW_SECONDS", 60.0)
    scene = play()
    old = await scene.start()
    answer = scene.ask()
    await old.hear()
    new = await connected(scene.folder)
    entering = asyncio.create_task(scene.attach(new))
    await asyncio.sleep(0.1)
    old.say(_done(1, 5))
    old.die()
    assert await answer == _done(1, 5)
    await entering
    scene.ask()
    assert await new.hear() == scene.train(2, moments=5)


async def test_a_late_answer_to_an_earlier_request_is_none(play: Play) -> None:
    scene = play()
    actor = await scene.start()
    answer = scene.ask()
    await actor.hear()
    for message in (_done(0, 3), Evaluated(1, 1.0), _done(1, 5)):
        actor.say(message)
    assert await answer == _done(1, 5)


async def test_an_error_of_a_program_is_the_callers(play: Play) -> None:
    scene = play()
    actor = await scene.start()
    answer = scene.ask()
    actor.say(Failed("no text in corpus/", "Add some."))
    with pytest.raises(PierError, match="no text") as caught:
        await answer
    assert caught.value.remedy == "Add some."


@pytest.mark.parametrize("line", [b"nonsense\n", b"x" * (LINE_LIMIT + 2)])
async def test_a_program_that_breaks_the_protocol_is_reported(play: Play, line: bytes) -> None:
    scene = play()
    actor = await scene.start()
    answer = scene.ask()
    await actor.hear()
    actor.write(line)
    with pytest.raises(PierError, match="broke the protocol"):
        await answer
    assert await actor.hear() is None


async def test_what_the_daemon_started_is_started_again(play: Play) -> None:
    scene = play()
    actor = await scene.start()
    answer = scene.ask()
    await actor.hear()
    (await scene.started()).kill()
    actor.die()
    second = await scene.enter()
    assert await second.hear() == scene.train(1, moments=0)
    second.say(_done(1, 5))
    await answer


async def test_a_program_that_dies_too_often_is_given_up(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_process, "MAX_RESTARTS", 1)
    scene = play()
    actor = await scene.start()
    await scene.started()
    answer = scene.ask()
    actor.die()
    (await scene.enter()).die()
    with pytest.raises(PierError, match="ends again and again") as caught:
        await answer
    assert str(tmp_path / "logs" / "workers.log") in caught.value.problem
    assert "no driver" in caught.value.problem


async def test_silence_has_an_end(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play()
    actor = await scene.start()
    assert scene.program.attach
    scene.program.attach = replace(scene.program.attach, patience=0.1)
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.2)
    with pytest.raises(PierError, match="has said nothing for 0 seconds"):
        await scene.program.evaluate(scene.load)
    assert isinstance(await actor.hear(), Evaluate)


async def test_a_program_that_leaves_the_run_is_no_failure(scene: Scene) -> None:
    left = list[int]()
    scene.program.on_left = left.append
    actor, _ = await scene.enter(600.0)
    training = scene.train()
    actor.say(Left(7))
    actor.die()
    await seen(lambda: left == [7])
    assert not training.done()


async def test_a_program_that_ends_after_it_has_left_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = tmp_path / "ends"
    program, left = await left_by(tmp_path, f"while [ ! -e {ends} ]; do sleep 0.05; done")
    again = await entered(tmp_path)  # a second training of the same program
    assert left == []
    again.say(Left(8))
    again.die()
    ends.touch()
    await seen(lambda: left == [8])
    monkeypatch.setattr(module, "END_SECONDS", 0)
    await program.stop()


async def test_a_site_does_not_hold_others_up_for_a_program_that_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REJOIN_SECONDS", 0.02)
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.02)
    ends, result = tmp_path / "ends", tmp_path / "result"
    program, left = await left_by(tmp_path, f"while [ ! -e {ends} ]; do sleep 0.05; done; touch {result}")
    await seen(lambda: left == [7])
    asyncio.get_running_loop().call_later(0.5, ends.touch)  # what a program does at its end may take long
    await program.stop()
    assert result.exists()


async def left_by(folder: Path, script: str) -> tuple[Program, list[int]]:
    """A program that goes on with a script once it has left the run after step 7; and what its daemon hears of that."""
    program, left = Program(folder / "socket", Command(("sh", "-c", script))), list[int]()
    program.place(CONFIG, 0, 1, folder)
    program.on_left = left.append
    starting = asyncio.create_task(program.start())
    actor = await entered(folder)
    await starting
    actor.say(Left(7))
    actor.die()
    return program, left


async def entered(folder: Path) -> Actor:
    """A program that keeps its optimizer to itself, and is ready."""
    actor = await connected(folder)
    actor.say(Attach(VERSION, TENSORS, 8, "", 1, 600, []))
    assert isinstance(await actor.hear(), Attached)
    actor.say(Ready())
    return actor


async def seen(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_stopping_closes_the_connection(play: Play) -> None:
    scene = play()
    actor = await scene.start()
    await scene.program.stop()
    assert await actor.hear() is None
