"""bench/hdee_share.py on three domains and with the smallest models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import hdee_share
from bench.hdee_setting import Arms, Setting
from bench.hdee_share import SHARES, Branch
from bench.hdee_train import Texts, cell_of, model_of, train
from pier_node.config.run import RunConfig

pytestmark = pytest.mark.processes

STEPS, SEED = 120, 2
TINY = Setting(
    domains=("topics", "numbers", "concurrency"), excluded=(), dim=16, layers=1, ffn_dim=16, context=32, test_rows=8,
    prior_rows=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def arms() -> Arms:
    return Arms(TINY)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(TINY, tmp_path_factory.mktemp("cache"))


def test_an_expert_alone_is_what_plain_training_makes_of_the_seed_model(
    arms: Arms, texts: Texts, tmp_path: Path
) -> None:
    branch = Branch(arms, texts, SEED, tmp_path, 50, STEPS)
    places = branch.experts_alone()
    inner = {"total_steps": STEPS // 2, "warmup_steps": 4, "batch_size": 1, "lr": 3e-3, "min_lr": 3e-4}
    config = RunConfig.model_validate({"model": branch.parent.config.model_dump(), "inner": inner})
    for name in TINY.domains:
        windows = texts.windows(name, SEED + hdee_share.LATER, f"alone {name}")
        expected = train(config, branch.parent.flat, [windows], 1).flat
        torch.testing.assert_close(model_of(places[name]).flat, expected, atol=1e-5, rtol=0)
        assert (expected - branch.parent.flat).abs().mean() > 1e-3


def test_all_arms_of_all_shares_have_the_same_tokens(arms: Arms, texts: Texts, tmp_path: Path) -> None:
    for share in SHARES:
        branch = Branch(arms, texts, SEED, tmp_path / str(share), share, STEPS)
        first = cell_of(branch.seed_model()).tokens
        assert first == share * STEPS * 3 * 32 // 100
        for places in (branch.experts_alone(), branch.continued()):
            assert first + sum(cell_of(place).tokens for place in places.values()) == STEPS * 3 * 32


def test_sites_continue_from_the_seed_model(arms: Arms, texts: Texts, tmp_path: Path) -> None:
    """With a learning rate of next to nothing they end where they began."""
    parent = Branch(arms, texts, SEED, tmp_path, 50, STEPS).parent
    slow = Branch(Arms(replace(TINY, seed_lr=1e-12)), texts, SEED, tmp_path, 50, STEPS)
    (place,) = slow.continued().values()
    torch.testing.assert_close(model_of(place).flat, parent.flat, atol=1e-6, rtol=0)


def test_from_nothing_to_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdee_share, "SETTING", TINY)
    monkeypatch.setattr(hdee_share, "WIDER", replace(TINY, dim=24))
    words = ["--cells", str(tmp_path), "--steps", str(STEPS), "--seeds", "1-2", "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(hdee_share.main, words)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["bits"]) == 3 * len(SHARES), "with what the seed models have themselves"
    assert [*found["against"]["alone after 0 %"]] == ["together after 0 %", hdee_share.WIDE]
    wide, narrow = (cell_of(tmp_path / f"steps-{STEPS}/seed-1/{it}/together") for it in ("wider", "0"))
    assert wide.steps < narrow.steps == STEPS
    assert wide.flops == pytest.approx(narrow.flops, rel=0.01)
    own, other = (found["bits"][f"{arm} after 50 %"] for arm in ("alone", "together"))
    gaps = [sum(own[name][seed] - other[name][seed] for name in TINY.domains) / len(TINY.domains) for seed in range(2)]
    assert found["against"]["alone after 50 %"]["together after 50 %"]["mean_gap"]["seeds"] == pytest.approx(gaps)
    monkeypatch.setattr(Branch, "_keep", None)
    again = CliRunner().invoke(hdee_share.main, words)
    assert again.exit_code == 0, "what is there is not trained again"
    assert json.loads((tmp_path / "found.json").read_text()) == found
