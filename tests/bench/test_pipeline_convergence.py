"""The trial of SkipPipe's arms: cells that are kept, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import pipeline_convergence
from bench.pipeline_convergence import ARMS, CUTS, QUICK, SITES, Setting, main
from bench.pipeline_report import arms_of, differences, tables, worse

TINY = Setting(
    dim=16, layers=6, ffn_dim=16, context=16, batch_size=1, microbatches=5, total_steps=2, eval_steps=1,
    warmup_steps=1, eval_batches=1, plan_seconds=0.01, seeds=(1,),
)  # fmt: skip


def cell(arm: str, seed: int, loss: float, exits: tuple[float, ...] = (), **visits: int) -> dict[str, Any]:
    omission = {"early exit": [[[5], it] for it in exits], **{name: [[[1], 2 * loss], [[2], loss]] for name in CUTS}}
    return {"arm": arm, "seed": seed, "curve": [[1, 9.0], [2, loss]], "visits": visits, "omission": omission}


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_what_its_name_says(arm: str) -> None:
    section = Setting().config(ARMS[arm], 1).pipeline
    skipped = 1 - section.path_length / section.stages
    assert f"{skipped:.0%}".replace("%", " %") in (arm if arm != "full" else "0 %")
    assert (section.swaps > 0) == ("swaps" in arm)


def test_sites_are_equally_busy() -> None:
    """The load of SkipPipe (arXiv 2502.19913): sizes n_0 (L - 1) = (S - 1) n_s."""
    for (stages, length), sites in SITES.items():
        first = sites // length
        assert first * length == sites
        assert first * (length - 1) % (stages - 1) == 0


def test_cells_are_kept_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_convergence, "QUICK", TINY)
    monkeypatch.setattr(pipeline_convergence, "ARMS", {name: ARMS[name] for name in ("full", "skip 50 %, swaps")})
    words = ["--quick", "--folder", str(tmp_path), "--plot", str(tmp_path / "it.png")]
    run = CliRunner().invoke(main, words, catch_exceptions=False)
    assert run.exit_code == 0
    assert sorted(it.name for it in tmp_path.iterdir()) == ["full-1.json", "it.png", "skip-50-swaps-1.json"]
    full = json.loads((tmp_path / "full-1.json").read_text())
    assert full["visits"] == {"0 1 2 3 4 5": 10}
    assert {name: len(found) for name, found in full["omission"].items()} == {
        "quarter": 3, "third": 10, "half": 10, "early exit": 5,
    }  # fmt: skip
    monkeypatch.setattr(pipeline_convergence, "cell", None)
    again = CliRunner().invoke(main, words, catch_exceptions=False)
    assert again.exit_code == 0
    assert "any quarter" in again.output
    other = CliRunner().invoke(main, ["--folder", str(tmp_path)])
    assert other.exit_code == 2
    assert "full-1.json was measured with another setting" in other.output


def test_losses_are_compared_seed_by_seed() -> None:
    cells = [cell("skip 50 %", 2, 2.5), cell("full", 1, 1.0), cell("skip 50 %", 1, 1.25), cell("full", 2, 2.0)]
    arms = arms_of(cells)
    assert [*arms] == ["full", "skip 50 %"]
    np.testing.assert_allclose(differences(arms, "skip 50 %"), [0.25, 0.5])
    np.testing.assert_allclose(differences(arms, "full"), 0.0)


def test_perplexity_with_stages_left_out_is_that_to_the_whole_model() -> None:
    found = worse(cell("full", 1, np.log(2.0)), "half")
    np.testing.assert_allclose(found, [1.0, 0.0], atol=1e-12)


def test_tables_say_what_was_swapped_and_left_out() -> None:
    exits = (float(np.log(3.0)), float(np.log(4.0)))
    cells = [
        cell("full", 1, float(np.log(2.0)), exits, **{"0 1": 4}),
        cell("skip 25 %", 1, float(np.log(2.0)), exits, **{"0 1 2": 3, "0 2 1": 1}),
    ]
    losses, omission, early = tables(cells)
    columns = [[*column.cells] for column in losses.columns]
    assert columns[0] == ["full", "skip 25 %"]
    assert columns[-1] == ["0%", "25%"]
    assert columns[-2] == ["0.6931", "1.0397"], "of half the model: the mean of ln 4 and ln 2"
    assert next(iter(omission.columns[1].cells)) == "+50.0% (+0.0% – +100.0%)"
    assert [[*column.cells][1] for column in early.columns] == ["skip 25 %", "+50.0%", "+100.0%"]


def test_quick_is_no_evidence() -> None:
    assert QUICK.total_steps < Setting().total_steps / 5
