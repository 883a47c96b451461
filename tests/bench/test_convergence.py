from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import convergence, convergence_grid
from bench.convergence import main
from bench.convergence_grid import METHODS, REPORTED, SETTINGS, TABLES, Cell, Found, named

LOSSES = {("sync", 0.004): 1.5, ("sync", 0.002): 1.6}


def put(folder: Path, cell: Cell, loss: float) -> None:
    figures = {"loss": loss, "sent_bytes": 1000, "ddp_bytes": 150_000, "cpu_seconds": 60.0}
    (folder / f"{cell.name}.json").write_text(json.dumps(figures))


def fill(folder: Path, loss_of: dict[tuple[str, float], float]) -> list[Cell]:
    """Pretend to run all that is missing of the table `methods`, in order."""
    cells = list[Cell]()
    while cell := next(Found(folder).missing(["methods"]), None):
        put(folder, cell, loss_of.get((cell.method, cell.values["lr"]), 2.0))
        cells.append(cell)
    return cells


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_run_and_every_cell_a_name(method: str, tmp_path: Path) -> None:
    cell = Cell("short", method, Found(tmp_path).tuned("short", method), 3)
    config = cell.config()
    assert config.inner.lr == cell.values["lr"]
    assert named(cell.name) == cell
    if "mu" in cell.values:
        assert (config.outer.momentum, config.outer.lr) == (cell.values["mu"], cell.values["eta"])


@pytest.mark.parametrize(
    "name", ["", "a_b_c", "short_sync_seed", "short_sync_q1_seed1", "short_sync_lr0.1", "short_zip_seed1"]
)
def test_what_is_no_cell_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"cell|unpack"):
        named(name)


def test_the_best_values_of_the_tuning_are_reported(tmp_path: Path) -> None:
    cells = fill(tmp_path, LOSSES)
    assert len({cell.name for cell in cells}) == len(cells), "nothing is run twice"
    assert [cell.seed for cell in cells[:5]] == [11] * 5, "tuned before it is reported"
    assert len({cell.method for cell in cells[:5]}) == 5, "a first cell of every method"
    found = Found(tmp_path)
    assert found.tuned("short", "sync") == {"lr": 0.004}
    assert {cell.seed for cell in cells if cell.method == "sync" and cell.values == {"lr": 0.004}} == {
        11,
        12,
        *REPORTED,
    }
    assert {cell.seed for cell in cells if cell.values == {"lr": 0.008}} == {11, 12}, "no reported seed"


def test_every_axis_begins_at_the_best_of_the_one_before(tmp_path: Path) -> None:
    fill(tmp_path, {("diloco-start", 0.008): 1.0, ("diloco-start", 0.016): 1.1})
    rates, outer = Found(tmp_path).trials("short", "diloco-start")
    assert {values["lr"] for values in rates} == {0.002, 0.004, 0.008, 0.016}, "one beyond the best"
    assert {values["lr"] for values in outer} == {0.008}
    assert Found(tmp_path).tuned("domains", "int4") == Found(tmp_path).tuned("short", "diloco-start")


def test_the_best_of_what_was_tried_counts_before_all_has_been(tmp_path: Path) -> None:
    for rate, loss in ((2e-3, 1.5), (8e-3, 1.4)):
        put(tmp_path, Cell("wide", "sync", {"lr": rate}, 11), loss)
    assert Found(tmp_path).tuned("wide", "sync") == {"lr": 0.008}


@pytest.fixture
def one_tiny_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    tiny: dict[str, Any] = {"dim": 16, "layers": 1, "ffn_dim": 16, "context": 16, "total_steps": 20, "warmup_steps": 2}
    setting = SETTINGS["quick"].__class__(**tiny, batch_size=2, inner_steps=5, eval_steps=10, eval_batches=1, sites=2)
    monkeypatch.setitem(SETTINGS, "quick", setting)
    monkeypatch.setattr(convergence_grid, "TABLES", {"tiny": ("quick", ("sync", "int4", "noloco"))})
    monkeypatch.setattr(convergence, "TABLES", convergence_grid.TABLES)
    monkeypatch.setattr(convergence, "CACHE", tmp_path / "cache")
    for name in ("sync", "diloco-start", "noloco"):
        monkeypatch.setitem(METHODS, name, METHODS[name].__class__(METHODS[name].outer, {}, (({"lr": 2e-3},),)))
    return tmp_path / "cells"


def call(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["--folder", str(folder), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_run_fills_the_tables_and_show_prints_them(one_tiny_table: Path, tmp_path: Path) -> None:
    missing = call(one_tiny_table, "run", "--list")
    assert "quick_sync_lr0.002_seed11\n" in missing
    assert call(one_tiny_table, "run", "--budget", "0") == "", "no time, no cell"
    call(one_tiny_table, "run")
    assert call(one_tiny_table, "run", "--list") == ""
    cell = json.loads((one_tiny_table / "quick_int4_lr0.002_seed1.json").read_text())
    assert [step for step, _ in cell["curve"]] == [10, 20]
    assert cell["ddp_bytes"] / cell["sent_bytes"] > 1
    shown = call(one_tiny_table, "show", "--plot", str(tmp_path / "plot.png"))
    assert "+0.00%" in shown
    assert "int4" in shown
    assert (tmp_path / "plot.png").stat().st_size > 1000
    again = call(one_tiny_table, "cell", "quick_sync_lr0.002_seed1")
    loss = json.loads((one_tiny_table / "quick_sync_lr0.002_seed1.json").read_text())["loss"]
    assert again.count(f"{loss:.4f}") == 2, "the same again"


def test_tables_name_methods_that_exist() -> None:
    for setting, methods in TABLES.values():
        assert setting in SETTINGS
        assert methods[0] == "sync"
        assert {*methods} <= {*METHODS}
