from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands.conftest import CONFIG, save_round

from pier_node.base.errors import PierError
from pier_node.rounds.saved_model import (
    Weights,
    exported_weights,
    find_weights,
    newest_weights,
    pick_device,
    site_config,
)
from pier_node.rounds.state_store import CHECKPOINTS, STATES, StateStore
from pier_node.trainer.model.export import export
from pier_node.trainer.model.initial import initial_weights


def test_a_site_gives_its_newest_anchor(site: Path) -> None:
    state = save_round(site, 4)
    weights = newest_weights(site)
    assert (weights.round, weights.origin, weights.tokenizer) == (4, "round 4 of run 'small'", "bytes")
    np.testing.assert_array_equal(weights.flat.numpy(), state.anchor)


def test_a_state_that_has_no_checkpoint_yet_is_newer(site: Path) -> None:
    checkpoints, states = (StateStore(site / name, CONFIG.hash()) for name in (CHECKPOINTS, STATES))
    state = checkpoints.newest_state()
    assert state
    shutil.rmtree(site / CHECKPOINTS)
    states.keep(replace(state, round=0))
    with pytest.raises(PierError, match="no checkpoint yet"):
        newest_weights(site)
    states.keep(replace(state, round=2))
    assert newest_weights(site).round == 2


def test_the_model_shares_the_memory_of_the_weights(site: Path) -> None:
    weights = newest_weights(site)
    model = weights.model(torch.device("cpu"))
    first = next(iter(model.parameters()))
    assert first.data_ptr() == weights.flat.data_ptr()
    assert sum(parameter.numel() for parameter in model.parameters()) == len(weights.flat)
    assert not model.training


def test_a_model_folder_gives_what_was_exported(tmp_path: Path) -> None:
    flat = initial_weights(CONFIG.model, seed=9)
    export(CONFIG.model, flat, tmp_path / "model")
    weights = find_weights(tmp_path / "no-site", tmp_path / "model")
    assert torch.equal(weights.flat, flat)
    assert weights.round is None
    assert weights.open_tokenizer().encode("né").tolist() == list("né".encode())


def test_folders_without_a_model_are_said(site: Path, tmp_path: Path) -> None:
    with pytest.raises(PierError, match="belongs to no run yet"):
        site_config(tmp_path)
    with pytest.raises(PierError, match="no model in Hugging Face's format"):
        exported_weights(site)
    (site / "checkpoints" / "round-00000003" / "checkpoint.json").unlink()
    with pytest.raises(PierError, match="has no checkpoint yet"):
        newest_weights(site)


def test_a_tokenizer_that_is_gone_is_said(site: Path) -> None:
    weights = Weights(CONFIG.model, torch.zeros(1), "/nowhere/tokenizer.json", "x")
    with pytest.raises(PierError, match=r"/nowhere/tokenizer.json"):
        weights.open_tokenizer()


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("cuda:99", "warp"):
        with pytest.raises(PierError, match=f"--device {name}"):
            pick_device(name)
