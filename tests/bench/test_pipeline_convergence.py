"""The trial of SkipPipe's arms: cells that are kept, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import pipeline_convergence
from bench.pipeline_arms import ALL, ARMS, CODED, CUTS, MIXED, SHORTER, SITES, TRIED, more_and_more
from bench.pipeline_convergence import PATHS, QUICK, Setting, main
from bench.pipeline_report import arms_of, differences, reached, shorter, so_far, tables, times, work, worse

TINY = Setting(
    dim=16, layers=6, ffn_dim=16, context=16, batch_size=1, microbatches=5, total_steps=2, eval_steps=1,
    warmup_steps=1, eval_batches=1, plan_seconds=0.01, seeds=(1,),
)  # fmt: skip


def cell(arm: str, seed: int, loss: float, exits: tuple[float, ...] = (), **visits: int) -> dict[str, Any]:
    omission = {"early exit": [[[5], it] for it in exits], **{name: [[[1], 2 * loss], [[2], loss]] for name in CUTS}}
    setting = {"layers": 6, "dim": 64, "total_steps": 400}
    return {
        "arm": arm,
        "seed": seed,
        "setting": setting,
        "curve": [[1, 9.0], [2, loss]],
        "visits": visits,
        "omission": omission,
    }


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
    monkeypatch.setattr(pipeline_convergence, "USUAL", {name: ARMS[name] for name in ("full", "skip 50 %, swaps")})
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
    losses, omission, early, *_ = tables(cells, {})
    columns = [[*column.cells] for column in losses.columns]
    assert columns[0] == ["full", "skip 25 %"]
    assert columns[-1] == ["0%", "25%"]
    assert columns[-2] == ["0.6931", "1.0397"], "of half the model: the mean of ln 4 and ln 2"
    assert next(iter(omission.columns[1].cells)) == "+50.0% (+0.0% – +100.0%)"
    assert [[*column.cells][1] for column in early.columns] == ["skip 25 %", "+50.0%", "+100.0%"]


@pytest.mark.parametrize("arm", CODED)
def test_codecs_are_those_of_the_name(arm: str) -> None:
    section = Setting().config(ALL[arm], 1).pipeline
    forward, _, back = arm.removeprefix("full, ").partition(", gradients ")
    assert (section.activation_codec, section.gradient_codec) == (forward, back or forward)


@pytest.mark.parametrize("arm", TRIED)
def test_a_fifth_of_the_steps_of_what_was_tried_is_full(arm: str) -> None:
    full = [step for step in range(400) if ALL[arm]["full_at"](step, 400)]
    assert len(full) == 80
    assert Setting().config(ALL[arm], 1) == Setting().config(ARMS[arm.partition(", ")[0]], 1)


def test_passes_are_full_more_and_more_often() -> None:
    parts = [sum(more_and_more(step, 400) for step in range(at, at + 40)) for at in range(240, 400, 40)]
    assert parts == [5, 15, 25, 35]


def test_only_the_arms_that_are_asked_for_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_convergence, "QUICK", TINY)
    words = ["--quick", "--folder", str(tmp_path), "--arm", "skip 25 %, every fifth full", "--arm", "full"]
    assert CliRunner().invoke(main, words, catch_exceptions=False).exit_code == 0
    assert sorted(it.name for it in tmp_path.iterdir()) == ["full-1.json", "skip-25-every-fifth-full-1.json"]


@pytest.mark.parametrize("arm", SHORTER)
def test_shorter_runs_have_a_whole_schedule(arm: str) -> None:
    inner = Setting().config(ALL[arm], 1).inner
    assert f"{inner.total_steps} steps" in arm
    assert inner.min_lr == inner.lr / 10


def test_work_is_in_blocks() -> None:
    """Stages of 1, 2, 1 and 2 blocks."""
    assert work(cell("full", 1, 1.0, (), **{"0 1 2 3 4 5": 8})) == 1.0
    assert work(cell("skip 25 %", 1, 1.0, (), **{"0 1 2": 2, "0 1 3": 2})) == pytest.approx((4 + 5) / 12)


def test_a_full_run_of_fewer_steps_is_between_those_that_are_there() -> None:
    arms = arms_of([cell("full", 1, 1.0), cell("full, 100 steps", 1, 2.0), cell("full, 100 steps", 2, 9.0)])
    assert shorter(arms, 1, 0.25) == pytest.approx(2.0)
    assert shorter(arms, 1, 0.5) == pytest.approx(1.5)
    assert shorter(arms, 1, 1.0) == pytest.approx(1.0)
    assert np.isnan(shorter(arms, 1, 0.2))
    whole = {**cell("full", 1, 1.0), "curve": [[100, 2.5], [400, 1.0]]}
    assert so_far({"full": [whole]}, 1, 0.25) == 2.5
    assert so_far({"full": [whole]}, 1, 0.5) == pytest.approx(1.75)


def test_skipping_is_judged_at_equal_work_and_time() -> None:
    mixed = next(iter(MIXED))
    exits = (1.5,)
    full = {**cell("full", 1, 1.0, exits, **{"0 1 2 3 4 5": 4}), "curve": [[1, 9.0], [400, 1.0]]}
    cells = [full, cell("full, 100 steps", 1, 3.0)]
    cells.append(cell("skip 25 %", 1, 1.5, exits, **{"0 1 2": 4}))
    cells.append(cell(mixed, 1, 1.5, exits, **{"0 1 2": 4, "0 1 2 3": 1}))
    shown = tables(cells, {"skip 25 %": 0.5})[-1]
    rows = list(zip(*([*column.cells] for column in shown.columns), strict=True))
    assert [row[0] for row in rows] == ["skip 25 %", mixed]
    gap = 1.5 - (3.0 - 2.0 * np.log(4 * 4 / 6) / np.log(4))
    early = 1.5 - (9.0 - 8.0 * np.log(400 * 4 / 6) / np.log(400))
    assert rows[0][2:5] == ("67%", *(f"{it:+.3f} ({it:+.3f} – {it:+.3f})" for it in (early, gap)))
    done = 400 ** (7.5 / 8) / 400  # of the full run's steps, when its loss is 1.5
    assert rows[0][5] == f"{4 / 6 / done:.2f}"
    assert rows[0][6] == "50%"
    assert rows[0][8] == "-0.500 (-0.500 – -0.500)"
    assert rows[0][9] == f"{0.5 / done:.2f}"
    assert rows[1][6] == "60%", "a fifth of the steps is full"


def test_a_loss_that_the_full_run_never_has_is_not_reached() -> None:
    full = {**cell("full", 1, 1.0), "curve": [[1, 9.0], [400, 1.0]]}
    assert np.isnan(reached({"full": [full]}, 1, 0.5))
    assert reached({"full": [full]}, 1, 1.0) == pytest.approx(1.0)


def test_codecs_are_judged_by_the_loss() -> None:
    cells = [cell("full", 1, 1.0, (1.5,), **{"0 1": 1}), cell("full, int8", 1, 1.005), cell("full, int4", 1, 1.02)]
    columns = [[*column.cells] for column in tables(cells, {})[4].columns]
    assert columns[0] == ["full, int8", "full, int4"]
    assert columns[1] == ["8.25 / 8.25", "4.25 / 4.25"]
    assert columns[-1] == ["yes", "no"]


def test_iterations_that_skip_take_less_time_in_every_instance() -> None:
    found = times(PATHS)
    assert sorted(found) == ["skip 25 %", "skip 33 %", "skip 50 %"]
    assert all(0.2 < it < 0.7 for it in found.values())


def test_quick_is_no_evidence() -> None:
    assert QUICK.total_steps < Setting().total_steps / 5


def test_replicas_are_compared_with_those_that_average_at_each_step() -> None:
    full, together = cell("full", 1, 1.0, (1.5,), **{"0 1": 1}), cell("two replicas, averaged at each step", 1, 2.0)
    shown = tables([full, together, cell("two replicas, H 10, int4", 1, 2.02)], {})[3]
    assert [[*column.cells] for column in shown.columns][2:] == [
        ["2.0000", "2.0200"],
        ["+0.0% (+0.0% – +0.0%)", "+1.0% (+1.0% – +1.0%)"],
    ]
