"""The bench of merged models, with tiny ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.merging import ENSEMBLE, main


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(
        main, ["--quick", "--cells", str(tmp_path / "cells"), "--seeds", "4", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert "x the ensemble" in done.output
    bits = json.loads(file.read_text())["bits_per_byte"]
    assert len(bits) == 11
    assert bits["merged, trained 300 steps"][0] < bits["merged, trained 100 steps"][0] < bits[ENSEMBLE][0]
