"""A tiny model on a tiny corpus, on one thread a process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pier_node.config import RunConfig
from pier_node.data.corpus import open_corpus
from pier_node.data.windows import Windows
from pier_node.inner import group
from pier_node.inner.messages import Hello, Message, decode, encode
from pier_node.inner.replica import Replica
from pier_node.model.initial import initial_weights
from pier_node.shared import SharedVector

CONTEXT, BATCH = 16, 4


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder, words = tmp_path / "texts", random.Random(1)
    folder.mkdir()
    for number in range(30):
        text = " ".join(words.choice(["pier", "anchor", "outer", "round"]) for _ in range(200))
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def configure(texts: Path) -> Callable[..., RunConfig]:
    def build(**inner: Any) -> RunConfig:
        tables = {
            "model": {"preset": "llama-tiny", "context": CONTEXT},
            "data": {"source": "text", "path": str(texts), "validation": 0.3},
            "inner": {"total_steps": 100, "batch_size": BATCH, "warmup_steps": 5, "eval_batches": 2, **inner},
        }
        return RunConfig.model_validate(tables)

    return build


@pytest.fixture
def config(configure: Callable[..., RunConfig]) -> RunConfig:
    return configure()


@pytest.fixture
def weights(config: RunConfig) -> SharedVector:
    flat = initial_weights(config.model, seed=1)
    vector = SharedVector(len(flat))
    vector.array[:] = flat.numpy()
    return vector


@pytest.fixture
def windows(config: RunConfig, tmp_path: Path) -> Windows:
    return Windows(open_corpus(config.data, 0, 1, None, tmp_path / "cache"), CONTEXT, config.run.seed, "node-a")


@pytest.fixture
def replica(config: RunConfig, weights: SharedVector) -> Replica:
    made = Replica(config, torch.device("cpu"), 1)
    made.load_weights(torch.from_numpy(weights.array))
    return made


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
    monkeypatch.setattr(group, "launcher", stage.launcher)
    monkeypatch.setattr(group, "LEAVE_SECONDS", 0.2)
    return stage
