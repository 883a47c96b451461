"""`pier-coordinator paths plan`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pipeline.planning.cases import problem

from pier_coordinator.cli import main
from pier_node.pipeline.planning.check import violations
from pier_node.pipeline.planning.plan import plan_from_dict, problem_to_json

IT = problem(link_s=1.0)
WORDS = ["paths", "plan", "--seconds", "0.1", "--problem"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    it = tmp_path / "problem.json"
    it.write_text(problem_to_json(IT))
    return it


def test_what_people_see(file: Path) -> None:
    picture = file.with_suffix(".svg")
    done = CliRunner().invoke(main, [*WORDS, str(file), "--svg", str(picture)], catch_exceptions=False)
    assert done.exit_code == 0
    for part in (
        "skip: 8 microbatches through 2 of 3 stages on 6 sites",
        "full pipeline, placed as well",
        "stage  site  busy",
        "bound",
    ):
        assert part in done.output
    assert picture.read_text().startswith("<svg")


def test_what_scripts_read(file: Path) -> None:
    done = CliRunner().invoke(main, [*WORDS, str(file), "--json", "--seed", "4"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert violations(IT, plan_from_dict(IT, found["plan"])) == []
    assert found["lower_bound_s"] <= found["makespan_s"] <= found["full_pipeline"]["makespan_s"]
    assert found["gap"] == pytest.approx(found["makespan_s"] / found["lower_bound_s"] - 1)
    assert [*found["utilisation"]] == [f"s{at}" for at in range(6)]
    assert found["per_microbatch_s"] == found["makespan_s"] / 8


def test_errors_are_explained(file: Path) -> None:
    file.write_text("{}")
    done = CliRunner().invoke(main, [*WORDS, str(file)])
    assert done.exit_code == 1
    assert "Error: the problem cannot be read: sites: Field required" in done.output


def test_help_compiles_nothing() -> None:
    script = "import sys, pier_coordinator.cli; print({'numba', 'numpy', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
