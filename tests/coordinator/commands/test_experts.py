"""`pier-coordinator experts`, as it is called; the planner itself has tests of its own."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from pydantic import BaseModel

from pier_coordinator.cli import main
from pier_coordinator.commands import experts
from pier_coordinator.commands.client import Client
from pier_coordinator.commands.experts import check_seed, experts_toml
from pier_coordinator.store.experts import AcceptedPlan
from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection, RunConfig
from pier_node.experts.card import Card, artefact_name, digest_of, load_ensemble
from pier_node.experts.config import DomainSection, ExpertsConfig, ExpertsSection, SolverSection, load
from pier_node.trainer.model.cost import flops_per_token
from pier_node.trainer.model.export import export
from pier_node.trainer.model.initial import initial_weights

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
    done = call("plan", file, "--dry-run")
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
    said = " ".join(done.output.split()).partition("Chains: ")[2].partition(" Done after")[0]
    chains = [chain.split(" → ") for chain in said.split("; ")]
    assert sorted(name for chain in chains for name in chain) == sorted(WORDS)
    assert not [line for line in done.output.splitlines() if line.startswith("auto ")]


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


MODEL = ModelSection.model_validate({"preset": "llama-tiny"})
SEED = "ab" * 32
ROW = {"size": "S", "steps": 100, "site": "lab-a", "after": -1, "expected_seconds": 9.0}


class Played:
    """Takes down what it is asked."""

    known: dict[str, Any]

    def __init__(self) -> None:
        self.home = type("Home", (), {"config": RunConfig(model=MODEL)})
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.known = {"plan": None, "experts": []}

    def act(self, action: str, **body: Any) -> dict[str, Any]:
        self.asked.append((action, body))
        return self.known


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(Client, "of", lambda _folder: played)
    return played


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path, lines = tmp_path / "experts.toml", ['[model]\npreset = "llama-tiny"\n[experts]\nmax_epochs = 100']
    for number, name in enumerate(("plain", "numbers", "names")):
        (tmp_path / name).write_text("".join(f"{name} {row * (number + 3) % 97} of {row}\n" for row in range(9000)))
        lines.append(f'[[domains]]\nname = "{name}"\nsource = "text"\npath = "{tmp_path / name}"')
    lines += [f'[[sites]]\nname = "{name}"\ntflops = 0.01' for name in ("lab-a", "lab-b")]
    path.write_text("\n".join(lines))
    return path


def call_run(*words: object, answer: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["experts", *map(str, words)], input=answer)


def test_a_plan_is_shown_and_started_only_when_accepted(tmp_path: Path, plan_file: Path, coordinator: Played) -> None:
    dry = call("start", plan_file, "--data", tmp_path, "--dry-run")
    assert (dry.exit_code, "lower bound" in dry.output, "Nothing was started" in dry.output) == (0, True, True)
    no = call_run("start", plan_file, "--data", tmp_path, answer="n\n")
    assert no.exit_code == 1
    assert "lower bound" in no.output
    assert "size pays, steps pay: " in no.output
    assert "idle: " in no.output
    assert coordinator.asked == []
    yes = call_run("start", plan_file, "--data", tmp_path, answer="y\n")
    assert yes.exit_code == 0, yes.output
    plan = AcceptedPlan.model_validate_json((tmp_path / "experts.json").read_text())
    assert coordinator.asked == [("experts", {"plan": plan.id})]
    assert [each.job.domain.name for each in plan.jobs] == ["plain", "numbers", "names"]
    assert plan.id[:8] in yes.output


def test_scripts_need_not_be_asked(tmp_path: Path, plan_file: Path, coordinator: Played) -> None:
    done = call_run("start", plan_file, "--data", tmp_path, "--yes", "--json")
    assert json.loads(done.output)["plan"] == coordinator.asked[0][1]["plan"]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"model": {"preset": "llama-1m"}}, "S is not the model of the run: experts.toml has model.dim = 32"),
        ({"model": {"preset": "llama-tiny", "ffn_dim": 65}}, r"has model\.ffn_dim = 64, run\.toml 65"),
        ({"model": {"preset": "llama-tiny"}, "outer": {"algorithm": "noloco"}}, "there is no common seed"),
        ({"model": {"preset": "llama-tiny"}, "data": {"tokenizer": "x.json"}}, "experts know bytes only"),
    ],
)
def test_a_run_that_experts_cannot_branch_from_is_refused(run: dict[str, Any], why: str) -> None:
    config = ExpertsConfig.model_validate({"model": {"preset": "llama-tiny"}})
    with pytest.raises(PierError, match=why):
        check_seed(config, RunConfig.model_validate(run))
    check_seed(config, RunConfig(model=MODEL))


def test_status_shows_each_expert_and_whether_all_are_there(coordinator: Played) -> None:
    assert call_run("status").exit_code == 3
    execution = {**ROW, "number": 1, "domain": "tools", "done": 40, **dict.fromkeys(experts_run_results())}
    result = {"name": "cd" * 16, "loss": 2.1, "parent_loss": 2.25, "standard_error": 0.01, "accepted": False}
    ended = {**ROW, "number": 0, "domain": "topics", "done": 100, "seconds": 9.5, **result}
    coordinator.known = {"plan": "e" * 32, "mode": "auto", "seconds": 90.0, "complete": False}
    coordinator.known["experts"] = [ended, execution]
    done = call_run("status")
    assert done.exit_code == 3
    assert "planned to take 90 s" in done.output
    assert "expected: with transfers" in done.output
    topics, tools = (line for line in done.output.splitlines() if line.startswith("to"))
    told = "topics S 100 lab-a 100 % 9 s 9.5 s 2.250 2.100 0.010 refused"
    assert " ".join(topics.split()) == told
    assert " ".join(tools.split()) == "tools S 100 lab-a 40 % 9 s - - - - -"
    assert json.loads(call_run("status", "--json").output) == coordinator.known


def test_status_fits_eighty_columns(coordinator: Played) -> None:
    result = {"name": "cd" * 16, "loss": 2.1, "parent_loss": 2.25, "standard_error": 0.01, "accepted": False}
    row = {**ROW, "number": 0, "domain": "d" * 64, "site": "s" * 40, "steps": 250_000, "done": 250_000}
    coordinator.known = {"plan": "e" * 32, "mode": "auto", "seconds": 90.0, "complete": True}
    coordinator.known["experts"] = [{**row, "seconds": 25_000.0, "expected_seconds": 24_000.0, **result}]
    lines = call("status", columns=80).output.splitlines()
    (told,) = [line.split() for line in lines if line.startswith("dd")]
    assert [told[0][-1], told[3][-1]] == ["…", "…"]
    assert " ".join(told[4:]) == "100 % 6.67 h 6.94 h 2.250 2.100 0.010 refused"


def test_when_all_are_there_status_says_how_to_have_them_answer(tmp_path: Path, coordinator: Played) -> None:
    result = {
        "name": "cd" * 16,
        "loss": 2.1,
        "parent_loss": 2.25,
        "standard_error": 0.01,
        "accepted": True,
        "seconds": 9.5,
    }
    rows = [{**ROW, **result, "number": n, "domain": name, "done": 100} for n, name in enumerate(("topics", "tools"))]
    rows[1]["site"] = "lab-b"
    coordinator.known = {"plan": "e" * 32, "mode": "auto", "seconds": 90.0, "complete": True, "experts": rows}
    done = call_run("status", "--data", tmp_path)
    assert done.exit_code == 0
    collect = f"pier-coordinator experts collect ensemble --data {tmp_path} --from LAB-A_FOLDER --from LAB-B_FOLDER"
    assert f"{collect} && pier-node serve --experts ensemble" in done.output


def experts_run_results() -> list[str]:
    return ["name", "loss", "parent_loss", "standard_error", "accepted", "seconds"]


def expert(site: Path, domain: str, accepted: bool) -> str:
    """An expert in a site's folder."""
    name = artefact_name(SEED, "0" * 32, "S", len(domain), 1)
    folder = export(MODEL, initial_weights(MODEL, seed=len(domain)), site / "experts" / name)
    fields = {"name": name, "domain": domain, "domain_hash": "0" * 32, "parent": SEED, "size": "S"}
    numbers = {"steps": len(domain), "seed": 1, "tokens": 9, "flops": 1.0, "epochs": 1.0, "loss": 2.0}
    gate = {"parent_loss": 2.1, "standard_error": 0.01, "accepted": accepted, "digest": digest_of(folder)}
    Card.model_validate({**fields, **numbers, **gate}).save(folder)
    return name


def test_experts_are_collected_and_a_parent_stands_in(tmp_path: Path, coordinator: Played) -> None:
    one, two, out = tmp_path / "one", tmp_path / "two", tmp_path / "out"
    good, bad = expert(one, "topics", accepted=True), expert(two, "tools", accepted=False)
    export(
        MODEL, torch.from_numpy(np.ones(len(initial_weights(MODEL, 1)), dtype=np.float32)), two / "experts" / SEED[:32]
    )
    rows = [
        {**ROW, "number": number, "domain": domain, "name": name}
        for number, (domain, name) in enumerate([("topics", good), ("tools", bad)])
    ]
    coordinator.known = {"plan": "e" * 32, "complete": False, "experts": rows}
    assert "the ensemble is not complete" in call_run("collect", out, "--from", one).output
    coordinator.known["complete"] = True
    assert "in none of the folders: lab-a has it" in call_run("collect", out, "--from", one).output
    done = call_run("collect", out, "--from", one, "--from", two)
    assert done.exit_code == 0, done.output
    assert f"pier-node serve --experts {out}" in done.output
    found = [(member.domain, member.folder, member.stands_in) for member in load_ensemble(out).members]
    assert found == [("topics", good, False), ("tools", SEED[:32], True)]
    assert not (out / bad).exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, coordinator: Played) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").touch()
    coordinator.known = {"plan": "e" * 32, "complete": True, "experts": []}
    assert "something else than an ensemble" in call_run("collect", tmp_path / "letters").output
