from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pier_node.engine import supervisor as module
from pier_node.engine.messages import LINE_LIMIT, Evaluate, Evaluated, Failed, Hello, Progress, encode
from pier_node.engine.supervisor import Ended, Group, WorkerGroup

STUBBORN = """
import signal, socket, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(sys.argv[2].encode())
time.sleep(600)
"""


@pytest.fixture
async def group(tmp_path: Path, stage: Any) -> AsyncIterator[Group]:
    made = Group(tmp_path / "log")
    await made.start(workers=2, max_restarts=0)
    await stage.launched()
    yield made
    if made.home.exists():
        await made.stop()


async def _next(group: Group) -> object:
    return await asyncio.wait_for(group.events.get(), 10)


def _hello(rank: int, attempt: int = 0) -> Hello:
    return Hello(rank, 2, attempt, "cpu")


async def test_a_team_is_whole_and_hears_what_it_is_told(group: Group, stage: Any) -> None:
    actors = [await stage.enter(_hello(rank)) for rank in (1, 0)]
    team = await _next(group)
    assert isinstance(team, WorkerGroup)
    assert team.hello.world == 2
    team.send(Evaluate(1, "vector"))
    assert [await actor.hear() for actor in actors] == [Evaluate(1, "vector")] * 2
    actors[0].say(Evaluated(1, 2.5))
    assert await _next(group) == Evaluated(1, 2.5)


async def test_the_socket_is_for_this_user_alone(group: Group) -> None:
    assert stat.S_IMODE(group.home.stat().st_mode) == 0o700
    assert len(str(group.home / "socket")) < 108


async def test_the_last_words_of_an_attempt_come_before_the_next_team(group: Group, stage: Any) -> None:
    old = [await stage.enter(_hello(rank)) for rank in range(2)]
    assert isinstance(await _next(group), WorkerGroup)
    new = [await stage.enter(_hello(rank, attempt=1)) for rank in range(2)]
    old[0].say(Progress(3, 1.0, 10, 0.5))
    for actor in old:
        actor.die()
    assert await _next(group) == Progress(3, 1.0, 10, 0.5)
    team = await _next(group)
    assert isinstance(team, WorkerGroup)
    assert team.hello.attempt == 1
    team.send(Evaluate(1, "vector"))
    assert [await actor.hear() for actor in new] == [Evaluate(1, "vector")] * 2


@pytest.mark.parametrize("line", [b"nonsense\n", b"x" * (LINE_LIMIT + 2)])
async def test_a_worker_that_breaks_the_protocol_is_reported(group: Group, stage: Any, line: bytes) -> None:
    actor = await stage.enter(_hello(0))
    actor.writer.write(line)
    failed = await _next(group)
    assert isinstance(failed, Failed)
    assert "broke the protocol" in failed.problem
    assert await actor.hear() is None


async def test_the_end_of_the_launcher_is_told_after_the_last_words(group: Group, stage: Any) -> None:
    actor = await stage.enter(_hello(0))
    assert group._process is not None
    group._process.kill()
    actor.say(Progress(3, 1.0, 10, 0.5))
    actor.die()
    assert await _next(group) == Progress(3, 1.0, 10, 0.5)
    assert await _next(group) == Ended(-9)


@pytest.mark.parametrize("known", [True, False])
async def test_stopping_closes_every_socket_and_removes_the_folder(group: Group, stage: Any, known: bool) -> None:
    actors = [await stage.enter(_hello(rank)) for rank in range(2)]
    if known:
        await _next(group)
    await group.stop()
    assert [await actor.hear() for actor in actors] == [None, None]
    assert not group.home.exists()


async def test_stopping_ends_what_ignores_sigterm_and_its_children(
    tmp_path: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = encode(Hello(0, 1, 0, "cpu")).decode()
    monkeypatch.setattr(module, "launcher", lambda socket, *_: [sys.executable, "-c", STUBBORN, str(socket), hello])
    group = Group(tmp_path / "log")
    await group.start(workers=1, max_restarts=0)
    assert isinstance(await _next(group), WorkerGroup)
    assert group._process is not None
    launcher = psutil.Process(group._process.pid)
    family = [launcher, *launcher.children(recursive=True)]
    assert len(family) == 2
    await group.stop()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
