"""The end of an expert's training, when something else is wanted of the site just then; the training is played."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator.expert_cases import accepted_job

from pier_node.config.run import RunConfig
from pier_node.experts import trainer
from pier_node.experts.reading import Text
from pier_node.experts.resume import ResumeState
from pier_node.experts.trainer import Parent, Shop, Verdict, train_expert

JOB, RUN = accepted_job(0, "lab-0").job, RunConfig()
NOTHING = np.zeros(4, dtype=np.float32)


async def read(_job: Any, _context: int, folder: Path) -> Text:
    return Text(1000, folder / "dev.npy")


async def trained(_self: Any) -> tuple[ResumeState, Verdict]:
    return ResumeState(100, 100, NOTHING, NOTHING, NOTHING), Verdict(1.0, 2.0, 0.1)


class Export:
    """Writes a model, and takes its time."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, _model: Any, _weights: Any, folder: Path, shard_bytes: int) -> Path:
        folder.mkdir()
        self.begun.set()
        assert self.may_end.wait(30.0)
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder


async def test_a_model_that_is_being_written_is_there_before_anything_else_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = Export()
    for name, played in {"read": read, "export": export}.items():
        monkeypatch.setattr(trainer, name, played)
    monkeypatch.setattr(trainer._Training, "run", trained)
    shop, parent = Shop(RUN, tmp_path), Parent("cd" * 32, RUN.model, NOTHING)
    training = asyncio.create_task(train_expert(JOB, parent, shop, lambda _: None))
    assert await asyncio.to_thread(export.begun.wait, 30.0)
    training.cancel()
    ended, _ = await asyncio.wait([training], timeout=0.05)
    assert not ended
    export.may_end.set()
    await asyncio.wait([training])
    card = await train_expert(JOB, parent, shop, lambda _: None)
    assert shop.place(card.name).exists()
