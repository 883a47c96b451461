from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.paths import main
from bench.paths_instances import instances


def test_the_instances() -> None:
    found = {it.name: it for it in instances()}
    assert len(found) == 8
    it = found["geo20_33_large"]
    assert (it.best_s, it.problem.microbatches) == (28.344, 30)
    assert it.solver_s == pytest.approx(76.29)
    assert it.cap_s == pytest.approx(3.973506)
    assert it.in_order.rules.max_swaps == 0
    assert [len(wave) for wave in it.plan(it.known["joint_waves_differ"]).waves] == [15, 15]


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    words = ["--quick", "--only", "geo9_25", "--only", "paper18_25_s4", "--json", str(file)]
    run = CliRunner().invoke(main, words, catch_exceptions=False)
    assert run.exit_code == 0
    found = {it["name"]: it for it in json.loads(file.read_text())["results"]}
    assert [*found] == ["geo9_25", "paper18_25_s4"] or [*found] == ["paper18_25_s4", "geo9_25"]
    for it in found.values():
        assert it["name"] in run.output
        for way in ("in_order", "swaps", "capped"):
            assert it[way]["wrong"] == []
            assert it["bound_s"] <= it[way]["makespan_s"] < it["full"]["makespan_s"]
        assert it["full"]["makespan_s"] < it["reference_full_s"]
