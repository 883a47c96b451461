"""The daemon's end of a program: programs that hang, and what follows. The programs are played by the test."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector
from pier_node.base.toml import validated
from pier_node.config.run import RunConfig
from pier_node.engine import program as module
from pier_node.engine.messages import (
    Attach,
    Attached,
    Done,
    Logged,
    Message,
    Progress,
    Publishing,
    Ready,
    Train,
    decode,
    encode,
)
from pier_node.engine.program import VERSION, Patience, Program, Standing
from pier_node.engine.ranks import PID, STEPS, enter

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
STANDING = Standing(3, 2, {"lab-b": 2.5})


class Actor:
    """A program of `ranks` ranks, of which this process is rank 0."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def say(self, message: Message) -> None:
        self._writer.write(encode(message))

    def write(self, line: bytes) -> None:
        self._writer.write(line)

    async def hear(self) -> Message | None:
        line = await asyncio.wait_for(self._reader.readline(), 10)
        return decode(line) if line else None


class Scene:
    """A daemon's end of a program that has been started by somebody else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program = folder, Program(folder / "socket", "")
        self.training: asyncio.Task[Done] | None = None
        self.logged: list[Logged] = []

    async def enter(self, patience: float, ranks: int = 1) -> tuple[Actor, Attached]:
        """A program that attaches, and is ready to train."""
        listening = asyncio.create_task(self.program.attached())
        actor = await self._connected()
        actor.say(Attach(VERSION, TENSORS, 8, "", ranks, patience))
        await listening
        self.program.check(CONFIG)
        self.program.place(CONFIG, 0, self.folder, lambda: STANDING, self.logged.append)
        starting = asyncio.create_task(self.program.start())
        place = await actor.hear()
        assert isinstance(place, Attached)
        actor.say(Ready())
        await starting
        return actor, place

    async def _connected(self) -> Actor:
        while True:
            try:
                return Actor(*await asyncio.open_unix_connection(self.folder / "socket"))
            except OSError:
                await asyncio.sleep(0.01)

    def train(self) -> asyncio.Task[Done]:
        self.training = asyncio.create_task(self.program.run(0, 100, 1, "weights", SharedVector(6)))
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


async def test_a_program_that_falls_silent_after_quick_steps_ends_its_site_with_words(scene: Scene) -> None:
    actor, place = await scene.enter(patience=0.2)
    row = enter(place.table, 1, 0)
    training = scene.train()
    await steps(actor, 12)
    row[STEPS] = 12
    with pytest.raises(PierError, match=r"hangs: it has said nothing for 0 seconds, and it is in its step 13") as told:
        await training
    assert "patience" in told.value.remedy


async def test_before_its_steps_are_known_a_program_may_be_silent_for_long(scene: Scene) -> None:
    actor, place = await scene.enter(patience=0.02)
    enter(place.table, 1, 0)
    training = scene.train()
    job = await steps(actor, 3)
    await asyncio.sleep(0.3)
    actor.say(Publishing(job))
    actor.say(Done(job, 8, 2.0, 0, 0.5, 0))
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
    actor.say(Done(train.id, 8, 2.0, 0, 0.5, 0))
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


STEP = Progress(1, 2.0, 8, 0.1)


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
    patience.said(Done(1, 8, 2.0, 0, 0.5, 0))
    assert patience.seconds() == module.FIRST_SECONDS


async def test_a_hung_command_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "DUMP_SECONDS", "RESTART_SECONDS", "LEAVE_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)
    program = Program(None, f"{sys.executable} {Path(__file__).with_name('hanging_program.py')}")
    monkeypatch.setenv("HANG_ONCE", str(tmp_path / "hung"))
    try:
        await program.attached()
        program.place(CONFIG, 0, tmp_path, lambda: STANDING, lambda _: None)
        await program.start()
        done = await asyncio.wait_for(program.run(0, 12, 1, "weights", SharedVector(6)), 60)
    finally:
        await program.stop()
    assert done.tokens == 8
    first = int((tmp_path / "hung").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(first, signal.SIGCONT)
