from __future__ import annotations

import asyncio
import json
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from signal import SIGKILL

import psutil
import pytest

from pier_node.base.errors import PierError
from pier_node.base.tasks import Hearing
from pier_node.engine import training_process
from pier_node.engine.training_process import ENGINE_VARIABLE, Child, Command, TrainingProcess

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
TELL = "import os; print(os.environ['PIER_ENGINE'], os.environ['WORD'], flush=True); raise SystemExit(3)"


class Scene:
    """A command with a log, and what has gone wrong with it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.log, self.heard, self.may_end = folder / "logs" / "log", Hearing(), False
        command = Command(words, {"WORD": "mole"}, self.log)
        self.tended = TrainingProcess(command, folder / "socket", self._failed, self._may_end)
        self.tended.start()

    async def _may_end(self) -> bool:
        return self.may_end

    def _failed(self, error: PierError) -> None:
        self.heard.error = error
        self.heard.hear()

    async def error(self) -> PierError:
        """What the daemon is told in the end."""
        await asyncio.wait_for(self.heard.until(lambda: self.heard.error is not None), 60)
        assert isinstance(self.heard.error, PierError)
        return self.heard.error

    async def said(self, seen: Callable[[str], bool]) -> str:
        """The log, as soon as it has what is looked for."""
        async with asyncio.timeout(60):
            while not (self.log.exists() and seen(self.log.read_text())):  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.02)
        return self.log.read_text()


Play = Callable[..., Scene]


@pytest.fixture
async def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    monkeypatch.setattr(training_process, "RESTART_SECONDS", 0.02)
    scenes: list[Scene] = []

    def begin(*words: str) -> Scene:
        scenes.append(Scene(tmp_path, *words))
        return scenes[-1]

    yield begin
    for scene in scenes:
        await scene.tended.stop(0.02)


async def test_a_command_that_ends_again_and_again_is_explained_with_its_log(play: Play, tmp_path: Path) -> None:
    error = await play(sys.executable, "-c", TELL).error()
    assert "the training program ends again and again (exit code 3)" in error.problem
    assert str(tmp_path / "logs" / "log") in error.problem
    assert error.problem.count(f"{tmp_path / 'socket'} mole") == 1 + training_process.MAX_RESTARTS


async def test_the_first_death_already_names_the_log_and_its_last_line(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await play("sh", "-c", "echo Traceback; echo; printf 'out of \\033[31mmemory\n\n'; exit 3").error()
    first = caplog.messages[0]
    log = tmp_path / "logs" / "log"
    assert first.startswith(
        f"the training program ended with exit code 3; it is started again. {log} ends with: out of "
    )
    assert first.isprintable()
    assert len(caplog.messages) == training_process.MAX_RESTARTS


async def test_a_death_without_a_word_names_the_log_all_the_same(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await play("sh", "-c", "exit 3").error()
    assert caplog.messages[0].endswith(f"it is started again. {tmp_path / 'logs' / 'log'} says nothing")


async def test_a_command_that_cannot_be_run_is_named(play: Play) -> None:
    error = await play("/nowhere/program").error()
    assert error.problem.startswith("--exec: /nowhere/program: ")
    assert "no such program" in error.problem
    with pytest.raises(PierError, match="--exec: torchrun 'x: "):
        Command.parse("torchrun 'x")
    with pytest.raises(PierError, match="there is no command"):
        Command.parse("")
    assert Command.parse("python 'my train.py'").words == ("python", "my train.py")


async def test_without_a_log_the_remedy_is_the_callers() -> None:
    error = Command(("a",)).explained("it is broken", "Mend it.")
    assert (error.problem, error.remedy) == ("it is broken", "Mend it.")


async def test_a_log_is_not_read_whole_for_its_end(tmp_path: Path) -> None:
    """It may be longer than there is memory."""
    log = tmp_path / "workers.log"
    with log.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(b"out of memory")
    tracemalloc.start()
    assert "out of memory" in Command(("a",), log=log).explained("it ended", "").problem
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


async def test_deaths_count_once_and_since_the_last_progress(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_process, "MAX_RESTARTS", 1)
    monkeypatch.setattr(training_process, "GIVE_UP_SECONDS", 0.02)
    scene = play("sh", "-c", "echo here; sleep 600")
    await scene.said(lambda text: "here" in text)
    for _ in range(3):
        scene.tended.came()
        scene.tended.died()
        scene.tended.died()
        scene.tended.progressed()
    assert scene.heard.error is None
    for _ in range(2):  # what it has started dies twice
        scene.tended.came()
        scene.tended.died()
    assert "ends again and again" in (await scene.error()).problem


async def test_a_command_that_may_end_is_not_started_again(play: Play) -> None:
    scene = play("sh", "-c", "echo here")
    scene.tended.over = True
    await scene.said(lambda text: "here" in text)
    await scene.tended.ended(60)
    await asyncio.sleep(0.1)
    assert scene.log.read_text() == "here\n"


async def test_a_command_that_ends_well_without_having_joined_is_told_so_at_once(play: Play) -> None:
    scene = play("sh", "-c", "echo once")
    error = await scene.error()
    assert error.problem.startswith("the training program ended, with exit code 0, without having called pier.join")
    assert scene.log.read_text() == "once\n"


async def test_stopping_ends_what_ignores_sigterm_and_its_children(play: Play) -> None:
    scene = play(sys.executable, "-c", STUBBORN)
    child = psutil.Process(int(await scene.said(lambda text: text.endswith("\n"))))
    parent = child.parent()
    assert parent is not None
    assert ENGINE_VARIABLE in parent.environ()
    await scene.tended.stop(0.2)
    _, alive = psutil.wait_procs([child, parent], timeout=30)
    assert alive == []


async def test_an_early_process_waits_for_its_environment_and_is_used_once(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "import os, sys; print(sys.stdin.read(), os.getppid(), flush=True)")
    early = Child(words, tmp_path / "early", None)
    command = Command(words, {"WORD": "mole"}, tmp_path / "log", early)
    assert early.waits
    first, second = command.start(tmp_path / "socket"), command.start(tmp_path / "socket")
    assert first is early
    assert not early.waits
    assert second is not early, "whatever has ended is started again as it is everywhere"
    assert [await first.wait(), await second.wait()] == [0, 0]
    told = {"WORD": "mole", ENGINE_VARIABLE: str(tmp_path / "socket")}
    assert (tmp_path / "early").read_text().startswith(json.dumps(told))
    assert not (tmp_path / "log").read_text().startswith("{")


async def test_an_early_process_that_has_died_is_none(tmp_path: Path) -> None:
    early = Child(("sh", "-c", "kill -9 $$"), tmp_path / "early", None)
    assert await early.wait() == -SIGKILL
    assert not early.waits
    assert await Command(("true",), early=early).start(tmp_path / "socket").wait() == 0


async def test_a_long_log_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_process, "LOG_BYTES", 10)
    log = tmp_path / "logs" / "workers.log"
    for _ in range(3):
        assert await Child(("echo", "twelve bytes"), log, {}).wait() == 0
    assert log.read_text() == log.with_name("workers.old.log").read_text() == "twelve bytes\n"
