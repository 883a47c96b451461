"""Actors in the place of the launcher and its workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pier_node.engine import supervisor
from pier_node.engine.messages import Hello, Message, decode, encode


class Actor:
    """A worker played by a test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def say(self, message: Message) -> None:
        self.writer.write(encode(message))

    async def hear(self) -> Message | None:
        """The next message; None when the other end is closed."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), 10)
        except ConnectionResetError:
            return None
        return decode(line) if line else None

    def die(self) -> None:
        self.writer.close()


class Stage:
    """Where processes that do nothing are in the launcher's place, and actors enter as workers."""

    def __init__(self) -> None:
        self._sockets: asyncio.Queue[Path] = asyncio.Queue()
        self._socket: Path | None = None

    def launcher(self, socket: Path, workers: int, max_restarts: int) -> list[str]:
        self._sockets.put_nowait(socket)
        return ["sleep", "600"]

    async def launched(self) -> None:
        """Until a group has been started: from now on actors enter that one."""
        self._socket = await asyncio.wait_for(self._sockets.get(), 10)

    async def enter(self, hello: Hello) -> Actor:
        assert self._socket is not None
        actor = Actor(*await asyncio.open_unix_connection(self._socket))
        actor.say(hello)
        return actor


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    monkeypatch.setattr(supervisor, "launcher", stage.launcher)
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 0.2)
    return stage
