"""The bench of merged models, with tiny ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.merging import ENSEMBLE, main


@pytest.mark.thorough
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(
        main, ["--quick", "--cells", str(tmp_path / "cells"), "--seeds", "4", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in done.output.splitlines()]
    speeds = {row[0]: float(row[-1].replace(",", "")) for row in rows if row and row[-1]}
    assert {*speeds} == {ENSEMBLE, "merged, not trained", "best single expert"}
    assert speeds[ENSEMBLE] < speeds["best single expert"]
    bits = json.loads(file.read_text())["bits_per_byte"]
    assert len(bits) == 13
    own, others = (
        bits[f"merged, trained 300 steps, without an expert: {it}"][0] for it in ("its domain", "the others")
    )
    assert own > others
    assert bits["merged, trained 300 steps"][0] < bits["merged, trained 100 steps"][0] < bits[ENSEMBLE][0]
