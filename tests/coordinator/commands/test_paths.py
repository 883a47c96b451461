"""`pier-coordinator paths plan`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from pipeline.planning.cases import SOME, problem

from pier_coordinator.cli import main
from pier_coordinator.commands.client import Client
from pier_coordinator.commands.paths import MOST_LINES, Measured, with_averaging
from pier_node.config.run import PipelineSection, load
from pier_node.outer.layout import Layout
from pier_node.pipeline.planner import build_problem
from pier_node.pipeline.planning import search
from pier_node.pipeline.planning.plan import plan_from_dict, violations
from pier_node.pipeline.planning.problem import LONGEST, problem_to_json

IT = problem(link_s=1.0)
WORDS = ["paths", "plan", "--seconds", "0.1", "--problem"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, no search is cut short."""
    monkeypatch.setattr(search, "PATIENCE", 6000)


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


RUN = """\
[run]
name = "lark"
sites = 6
[model]
preset = "llama-tiny"
layers = 3
[inner]
batch_size = 2
precision = "fp32"
[pipeline]
stages = 3
paths = "skip"
skip = 0.34
microbatches = 4
"""
TENSOR = 16384
"""Bytes of a tensor between two sites of that run."""
SECTION = PipelineSection(stages=3, skip=0.34, microbatches=4)


def site(at: int, **changes: Any) -> dict[str, Any]:
    """A site that has measured, but for one line."""
    ways = {node(to): 0.25 + 0.01 * to for to in range(6) if to not in (at, at - 1)}
    times = {"stage": at % 3, "memory": 2, "forward": 1.0 + at, "backward": 2.0, "loss": 0.5}
    return {"node": node(at), "name": f"lab-{at}", **times, "transfer": ways, "round_trip": {}, **changes}


def node(at: int) -> str:
    return f"{at:016x}"


SIX = [site(at) for at in range(6)]


class Answering:
    """What `/api/pipeline` answers; calls the command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sites, self.plan = folder, SIX, dict[str, Any]()
        (folder / "run.toml").write_text(RUN)

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/api/pipeline"
        return {"sites": self.sites, "plan": self.plan or None}

    def call(self, *words: str) -> Result:
        words = ("paths", "plan", "--data", str(self.folder), "--seconds", "0.1", *words)
        return CliRunner(env={"COLUMNS": "140"}).invoke(main, words, catch_exceptions=False)

    def refusal(self) -> str:
        done = self.call()
        assert done.exit_code == 1
        return done.stderr


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answering:
    (tmp_path / "daemon.json").write_text('{"http": "http://127.0.0.1:1", "address": "h:1"}')
    answering = Answering(tmp_path)
    monkeypatch.setattr(Client, "get", lambda _, path: answering.get(path))
    return answering


def test_what_people_see_of_a_run(run: Answering) -> None:
    run.plan = {"seconds": 12.5}
    said = run.call().stdout
    for part in (
        "Measured for a microbatch",
        "lab-4      1      5 s       2 s  500 ms       2",
        "A tensor of 16.4 kB on its way, there and back",
        "lab-0    lab-5  300 ms  250 ms  0.437 Mbit/s  0.524 Mbit/s           -",
        "skip: 4 microbatches through 2 of 3 stages on 6 sites",
        "the run's own paths, as it planned them",
        "12.50 s       3.125 s                     -",
        "bound with these stages",
        "stage  site   busy",
    ):
        assert part in said, f"{part!r} is not in\n{said}"


def test_what_scripts_read_of_a_run(run: Answering) -> None:
    found = json.loads(run.call("--json", "--policy", "full").stdout)
    assert (found["policy"], found["measured"]["sites"]) == ("full", SIX)
    assert {len(path) for wave in found["plan"]["waves"] for path in wave} == {3}
    assert found["lower_bound_s"] <= found["makespan_s"]


def test_paths_are_as_the_run_has_them_unless_others_are_asked_for(run: Answering) -> None:
    (run.folder / "run.toml").write_text(RUN.replace('"skip"', '"random"'))
    assert json.loads(run.call("--json").stdout)["policy"] == "random"
    assert json.loads(run.call("--json", "--policy", "skip").stdout)["policy"] == "skip"


def coupled() -> list[dict[str, Any]]:
    """Sites whose links are fast within the pairs 0-1, 2-3 and 4-5 and a hundred times as slow elsewhere."""
    ways = [{node(to): 0.01 if to // 2 == at // 2 else 1.0 for to in range(6) if to != at} for at in range(6)]
    return [site(at, forward=1.0, transfer=each) for at, each in enumerate(ways)]


def test_replicas_that_average_at_every_step_are_near_each_other(run: Answering) -> None:
    run.sites, run.plan = coupled(), {"seconds": 12.5}
    found = json.loads(run.call("--json", "--policy", "full").stdout)
    assert sorted(sorted(sites) for sites in found["plan"]["stages"]) == [
        ["lab-0", "lab-1"],
        ["lab-2", "lab-3"],
        ["lab-4", "lab-5"],
    ]
    stage = Layout.of(load(run.folder / "run.toml").model).length // 3
    assert found["sync_s"] == pytest.approx(0.01 * 4 * stage / TENSOR)
    said = run.call("--policy", "full").stdout
    assert "of this plan, averaging between replicas" in said
    assert "the run's own paths, as it planned them, without averaging" in said


@pytest.mark.parametrize(
    ("outer", "part"), [("", 1.0), ('"diloco"\ninner_steps = 20', 1 / 20), ('"pier"\ncodec = "int4"', 0.13 / 50)]
)
def test_what_replicas_exchange_rarely_or_coded_takes_less_time(tmp_path: Path, outer: str, part: float) -> None:
    (tmp_path / "run.toml").write_text(RUN + (f"[outer]\nalgorithm = {outer}\n" if outer else ""))
    config = load(tmp_path / "run.toml")
    problem = with_averaging(Measured(SIX, None, None).problem(SECTION, seed=1), config, TENSOR)
    whole = 4 * Layout.of(config.model).length / 3
    assert problem.gradient_s[2][5] == pytest.approx(problem.transfer_s[2][5] * part * whole / TENSOR, rel=0.03)


def test_no_link_averages_for_longer_than_can_be_planned(run: Answering) -> None:
    run.sites = [site(at, transfer={node(to): LONGEST for to in range(6) if to != at}) for at in range(6)]
    assert json.loads(run.call("--json").stdout)["sync_s"] <= 2 * LONGEST


def test_averaging_is_not_counted_if_the_size_of_tensors_is_not_known(run: Answering) -> None:
    (run.folder / "run.toml").write_text(RUN.replace('precision = "fp32"\n', ""))
    assert json.loads(run.call("--json").stdout)["sync_s"] == 0.0


def test_the_problem_is_that_which_the_sites_would_pose() -> None:
    problem = Measured(SIX, None, None).problem(SECTION, seed=1)
    assert [(it.name, it.forward_s, it.memory) for it in problem.sites] == [
        (f"lab-{at}", 1.0 + at, 2) for at in range(6)
    ]
    assert problem.transfer_s[2][5] == 0.3
    assert problem.transfer_s[2][1] == pytest.approx(0.285), "the median of its other lines"
    assert (problem.path_length, problem.microbatches, sum(problem.stage_sizes)) == (2, 4, 6)


TIMES = st.floats(0.001, 100)
SITES = st.integers(3, 6).flatmap(
    lambda count: st.tuples(*(st.builds(site, st.just(at), forward=TIMES, backward=TIMES) for at in range(count)))
)


@SOME
@given(SITES)
def test_whatever_was_measured_can_be_planned_and_shown(sites: tuple[dict[str, Any], ...]) -> None:
    measured = Measured([*sites], 1 << 20, None)
    problem = measured.problem(SECTION, seed=1)
    _, plan = build_problem(SECTION, measured.places(), {}, seed=1)
    assert violations(problem, plan) == []
    assert measured.view()


def test_of_many_lines_the_slowest_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    many = [site(at) for at in range(6)] + [site(at, transfer={node(0): float(at)}) for at in range(6, 40)]
    Console(width=140).print(Measured(many, None, None).view())
    said = capsys.readouterr().out
    assert f"and {15 + 34 - MOST_LINES} faster ones" in said
    assert "lab-39" in said.partition("on its way")[2]
    assert "lab-7 " not in said.partition("on its way")[2]


def test_what_is_missing_is_named(run: Answering) -> None:
    run.sites = [*SIX[:4], site(4, forward=None), site(5, backward=0.0)]
    assert "not measured yet: lab-4, lab-5\nA site measures while it trains" in run.refusal()
    run.sites = SIX[:2]
    assert "2 of the run's sites are here: too few for 3 stages" in run.refusal()
    run.sites = []
    assert "no site of the run" in run.refusal()
    (run.folder / "run.toml").write_text(RUN.replace("stages = 3", "stages = 1"))
    said = run.refusal()
    assert "is no pipeline: its run.toml has no [pipeline] with stages" in said
    assert "--problem FILE" in said
    (run.folder / "daemon.json").unlink()
    assert "no coordinator runs" in run.refusal()


def test_the_plan_is_of_these_sites(run: Answering) -> None:
    found = json.loads(run.call("--json").stdout)
    problem = Measured(SIX, None, None).problem(SECTION, seed=1)
    assert violations(problem, plan_from_dict(problem, found["plan"])) == []
