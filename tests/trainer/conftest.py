"""A tiny model on a tiny corpus, on one thread a process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica

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
