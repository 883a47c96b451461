"""`pier-coordinator experts`, as it is called; the planner itself has tests of its own."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import BaseModel

from pier_coordinator.cli import main
from pier_coordinator.commands import experts
from pier_coordinator.commands.experts import experts_toml
from pier_node.config.run import ModelSection, RunConfig
from pier_node.experts.config import DomainSection, ExpertsConfig, ExpertsSection, SolverSection, load
from pier_node.trainer.model.cost import flops_per_token

WORDS = {
    "plain": ["the"] * 3,
    "numbers": [str(number) for number in range(500)],
    "names": ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"] * 4,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experts.toml of three small domains and two sites."""
    path, lines = tmp_path / "experts.toml", ['[model]\npreset = "llama-tiny"\n[experts]\nmax_epochs = 100']
    for number, (name, words) in enumerate(WORDS.items()):
        rows = (f"{words[row * (number + 3) % len(words)]} of {row}\n" for row in range(9000))
        (tmp_path / name).write_text("".join(rows))
        lines.append(f'[[domains]]\nname = "{name}"\nsource = "text"\npath = "{tmp_path / name}"')
    for name, speed in (("a", 0.01), ("b", 0.03)):
        lines.append(f'[[sites]]\nname = "{name}"\ntflops = {speed}\nmemory_gb = 1.0')
    path.write_text("\n".join(lines))
    return path


def call(*words: object, columns: int = 120) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["experts", *(str(word) for word in words)])


def test_init_writes_every_key_with_its_meaning(tmp_path: Path) -> None:
    path = tmp_path / "experts.toml"
    done = call("init", path, "--preset", "llama-30m")
    assert done.exit_code == 0
    assert f"pier-coordinator experts plan {path}" in done.output
    assert load(path) == ExpertsConfig.model_validate({"model": {"preset": "llama-30m"}})
    text = path.read_text()
    sections: list[type[BaseModel]] = [ExpertsConfig, ExpertsSection, SolverSection, DomainSection, ModelSection]
    assert all(key in text for section in sections for key in section.model_fields)


def test_examples_in_comments_are_allowed() -> None:
    """Taken out of their comments they are read, and a domain may name the site."""
    config = experts_toml()
    examples = [line.removeprefix("#   ") for line in config.partition("# A domain of your own")[2].splitlines()]
    tables = [line for line in examples if line.startswith("[[") or (" = " in line and not line.startswith("#"))]
    assert len(tables) == 13
    read = ExpertsConfig.model_validate(tomllib.loads(config + "\n" + "\n".join(tables)))
    assert read.domains[-1].sites == ("lab-a",)
    assert read.sites[0].hours == 12.0


def test_what_exists_is_not_overwritten_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "experts.toml"
    path.write_text("mine")
    assert "exists" in call("init", path).output
    assert path.read_text() == "mine"
    assert call("init", path, "--force").exit_code == 0
    assert "No such file" in call("init", tmp_path / "no" / "experts.toml").output


def test_a_plan_says_who_trains_what_and_how_good_it_is(file: Path) -> None:
    done = call("plan", file)
    assert done.exit_code == 0, done.output
    for said in (*WORDS, "above the lower bound of", "MHo-IHe", "MHe-IHo", "auto ←", "nothing has been started"):
        assert said in done.output
    assert max(map(len, done.output.splitlines())) <= 120
    (bar,) = [line for line in done.output.splitlines() if line.startswith("b  ")]
    assert "│" in bar


def test_json_has_all_of_it(file: Path) -> None:
    done = call("plan", file, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["chosen"] == "auto"
    assert {*told["plans"]} == {"auto", "MHo-IHo", "MHo-IHe", "MHe-IHo"}
    assert [domain["name"] for domain in told["domains"]] == [*WORDS]
    for plan in told["plans"].values():
        placed = [domain["name"] for site in plan["sites"] for job in site["experts"] for domain in job["domains"]]
        assert sorted(placed) == sorted(WORDS)
        ends = [job["ends"] for site in plan["sites"] for job in site["experts"]]
        assert max(ends) == pytest.approx(plan["seconds"])
        assert plan["bound"] <= plan["seconds"] * (1 + 1e-9)
        assert abs(plan["flops"] / plan["budget"] - 1) < 0.01
    assert json.loads(call("plan", file, "--json").stdout) == told, "the same every time"


def test_chains_of_the_paper(file: Path) -> None:
    file.write_text(file.read_text().replace("[experts]", '[experts]\nlineage = "chain"\nheterogeneity = "MHe-IHo"'))
    done = call("plan", file)
    assert done.exit_code == 0, done.output
    assert "MHe-IHo ←" in done.output
    assert "auto" not in done.output


def test_what_fits_nowhere_is_said_with_what_is_lacking(file: Path) -> None:
    file.write_text(file.read_text().replace("memory_gb = 1.0", "memory_gb = 0.0001"))
    failed = call("plan", file)
    assert failed.exit_code == 1
    assert "fits at no site: a has 100 kB, b has 100 kB" in failed.output


def test_hours_that_are_too_short_are_said(file: Path) -> None:
    file.write_text(file.read_text().replace("memory_gb = 1.0", "hours = 0.0001"))
    assert "is not available for long enough" in call("plan", file).output


def test_a_budget_that_is_too_small_is_said(file: Path) -> None:
    file.write_text(file.read_text().replace("[experts]", "[experts]\nbudget_flops = 1e9"))
    assert "the budget is too small for the minimum steps" in call("plan", file).output


def test_text_that_is_too_short_to_be_measured_is_said(file: Path) -> None:
    (file.parent / "plain").write_text("".join(f"{row}\n" * 200 for row in range(40)))
    assert "domain plain" in call("plan", file).output


def test_without_sites_and_without_a_run_both_ways_are_named(file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().partition("[[sites]]")[0])
    failed = call("plan", file, "--data", tmp_path)
    assert failed.exit_code == 1
    assert "experts.toml has no [[sites]]" in failed.output
    assert "--data" in failed.output


@dataclass
class Told:
    """A coordinator that knows these sites."""

    sites: list[dict[str, Any]]

    def of(self, _folder: Path) -> Told:
        return self

    @property
    def home(self) -> Any:
        return SimpleNamespace(config=RunConfig())

    def get(self, _path: str) -> dict[str, Any]:
        return {"sites": self.sites}


def test_the_sites_of_a_run_are_as_fast_as_they_train_there(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"state": "training", "tokens_per_second": 1000.0, "uplink": None}
    silent = {**row, "name": "gone", "state": "silent"}
    monkeypatch.setattr(experts, "Client", Told([{**row, "name": "a"}, {**row, "name": "b", "uplink": 1e6}, silent]))
    found = experts.registered(tmp_path)
    assert [site.name for site in found] == ["a", "b"]
    assert found[0].speed == 1000 * flops_per_token(RunConfig().model)
    assert [site.line for site in found] == [float("inf"), 1e6]
    file.write_text(file.read_text().partition("[[sites]]")[0])
    assert call("plan", file, "--data", tmp_path).exit_code == 0
    monkeypatch.setattr(experts, "Client", Told([silent]))
    assert "no site trains" in call("plan", file, "--data", tmp_path).output


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    failed = call("plan", tmp_path / "none.toml")
    assert (failed.exit_code, "pier-coordinator experts init" in failed.output) == (1, True)
