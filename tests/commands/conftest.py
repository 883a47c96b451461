"""A data folder with a checkpoint in it, as a site leaves one; and a real run of two sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from processes.run import CORPUS, Run

from pier_node.base.shared import SharedVector
from pier_node.cli import main
from pier_node.config.run import RunConfig
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.folder import SiteRecord, save_run
from pier_node.rounds.state_store import Checkpoint, StateStore
from pier_node.trainer.model.initial import initial_weights

TABLES = {
    "run": {"name": "small", "sites": 2},
    "model": {"preset": "llama-tiny"},
    "data": {"source": "text", "path": str(CORPUS), "validation": 0.1},
    "inner": {"total_steps": 100, "batch_size": 2, "eval_batches": 3},
    "outer": {"inner_steps": 10},
}
CONFIG = RunConfig.model_validate(TABLES)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def call() -> Callable[..., Result]:
    """Calls pier-node as a terminal of 100 columns would."""
    return lambda *words: CliRunner(env={"COLUMNS": "100"}).invoke(main, [str(word) for word in words])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The data folder of a site that stopped after round 3."""
    folder = tmp_path / "site"
    folder.mkdir()
    save_run(folder, CONFIG)
    SiteRecord(founder=True, slot=1).save(folder)
    save_round(folder, 3)
    return folder


def save_round(folder: Path, number: int) -> OuterState:
    """Save a checkpoint; its weights are made from its number."""
    flat = initial_weights(CONFIG.model, seed=number)
    tensors = {name: SharedVector(len(flat)) for name in (ANCHOR, MOMENTUM)}
    tensors[ANCHOR].array[:] = flat.numpy()
    state = OuterState(number, ("a" * 16,), tensors, {"a" * 16: 5})
    checkpoint = Checkpoint(state, inner_step=10 * number, tokens=1000 * number)
    StateStore(folder / "checkpoints", CONFIG.hash()).save(checkpoint)
    return state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two sites in the middle of training; who uses it lets them go on."""
    made = Run(tmp_path_factory.mktemp("live"), 2, inner={"total_steps": 10_000_000, "eval_every": 1})
    made.start()
    for site in made.sites:
        site.reach(2)
    yield made
    for site in made.sites:
        site.kill()
