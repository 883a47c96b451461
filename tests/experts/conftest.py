"""Small domains, a small parent that knows a little, and jobs for its experts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pier_node.config.run import RunConfig
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_held_out
from pier_node.experts.job import ExpertJob
from pier_node.experts.trainer import Parent, Shop
from pier_node.trainer.model.initial import initial_weights

STEPS, BATCH, CONTEXT = 40, 4, 32
WORDS = {
    "sea": "pier anchor harbour tide wave",
    "sky": "cloud rain wind storm sun",
    "land": "hill field road stone wall",
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture
def domain(tmp_path: Path) -> Callable[[str], DomainSection]:
    def build(name: str) -> DomainSection:
        folder, dice = tmp_path / "texts" / name, random.Random(name)
        if not folder.exists():
            folder.mkdir(parents=True)
            for number in range(120):
                text = " ".join(dice.choice(WORDS[name].split()) for _ in range(80))
                (folder / f"{number}.txt").write_text(text)
        return DomainSection(name=name, source="text", path=str(folder))

    return build


@pytest.fixture
def make_job(domain: Callable[[str], DomainSection]) -> Callable[..., ExpertJob]:
    def build(name: str = "sea", **changed: Any) -> ExpertJob:
        section = domain(name)
        fields: dict[str, Any] = {
            "number": 0,
            "domain": section,
            "domain_hash": read_held_out(section).digest,
            "size": "S",
            "ffn_dim": 64,
            "steps": STEPS,
            "seed": 7,
            "batch_size": BATCH,
            "lr": 3e-3,
            "min_lr": 3e-4,
            "warmup_steps": 5,
        }
        return ExpertJob.model_validate({**fields, **changed})

    return build


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    run = RunConfig.model_validate({"model": {"preset": "llama-tiny", "context": CONTEXT}})
    return Shop(run, tmp_path / "site", workers=1)


@pytest.fixture
def parent(shop: Shop) -> Parent:
    return Parent("ab" * 32, shop.run.model, initial_weights(shop.run.model, seed=1).numpy())
