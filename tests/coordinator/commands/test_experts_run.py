"""`pier-coordinator experts start | status | collect` with a coordinator that is played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from pier_coordinator.cli import main
from pier_coordinator.commands.client import Client
from pier_coordinator.commands.experts_run import check_seed
from pier_coordinator.store.experts import AcceptedPlan
from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection, RunConfig
from pier_node.experts.card import Card, artefact_name, digest_of, load_ensemble
from pier_node.experts.config import ExpertsConfig
from pier_node.trainer.model.export import export
from pier_node.trainer.model.initial import initial_weights

MODEL = ModelSection.model_validate({"preset": "llama-tiny"})
SEED = "ab" * 32
ROW = {"size": "S", "steps": 100, "site": "lab-a", "after": -1, "planned_seconds": 9.0}


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
def file(tmp_path: Path) -> Path:
    path, lines = tmp_path / "experts.toml", ['[model]\npreset = "llama-tiny"\n[experts]\nmax_epochs = 100']
    for number, name in enumerate(("plain", "numbers", "names")):
        (tmp_path / name).write_text("".join(f"{name} {row * (number + 3) % 97} of {row}\n" for row in range(9000)))
        lines.append(f'[[domains]]\nname = "{name}"\nsource = "text"\npath = "{tmp_path / name}"')
    lines += [f'[[sites]]\nname = "{name}"\ntflops = 0.01' for name in ("lab-a", "lab-b")]
    path.write_text("\n".join(lines))
    return path


def call(*words: object, answer: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["experts", *map(str, words)], input=answer)


def test_a_plan_is_shown_and_started_only_when_it_is_accepted(tmp_path: Path, file: Path, coordinator: Played) -> None:
    no = call("start", file, "--data", tmp_path, answer="n\n")
    assert no.exit_code == 1
    assert "lower bound" in no.output
    assert coordinator.asked == []
    yes = call("start", file, "--data", tmp_path, answer="y\n")
    assert yes.exit_code == 0, yes.output
    plan = AcceptedPlan.model_validate_json((tmp_path / "experts.json").read_text())
    assert coordinator.asked == [("experts", {"plan": plan.id})]
    assert [each.job.domain.name for each in plan.jobs] == ["plain", "numbers", "names"]
    assert plan.id[:8] in yes.output


def test_scripts_need_not_be_asked(tmp_path: Path, file: Path, coordinator: Played) -> None:
    done = call("start", file, "--data", tmp_path, "--yes", "--json")
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
    assert call("status").exit_code == 3
    execution = {**ROW, "number": 1, "domain": "tools", "done": 40, **dict.fromkeys(experts_run_results())}
    result = {"name": "cd" * 16, "loss": 2.1, "parent_loss": 2.25, "standard_error": 0.01, "accepted": False}
    ended = {**ROW, "number": 0, "domain": "topics", "done": 100, "seconds": 9.5, **result}
    coordinator.known = {"plan": "e" * 32, "mode": "auto", "seconds": 90.0, "complete": False}
    coordinator.known["experts"] = [ended, execution]
    done = call("status")
    assert done.exit_code == 3
    assert "planned to take 90 s" in done.output
    topics, tools = done.output.splitlines()[-2:]
    told = "topics S 100 lab-a 100 % 9 s 9.5 s 2.250 2.100 0.010 refused: the parent stands in"
    assert " ".join(topics.split()) == told
    assert " ".join(tools.split()) == "tools S 100 lab-a 40 % 9 s - - - - -"
    assert json.loads(call("status", "--json").output) == coordinator.known


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
    done = call("status", "--data", tmp_path)
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
    assert "the ensemble is not complete" in call("collect", out, "--from", one).output
    coordinator.known["complete"] = True
    assert "in none of the folders: lab-a has it" in call("collect", out, "--from", one).output
    done = call("collect", out, "--from", one, "--from", two)
    assert done.exit_code == 0, done.output
    assert f"pier-node serve --experts {out}" in done.output
    found = [(member.domain, member.folder, member.stands_in) for member in load_ensemble(out).members]
    assert found == [("topics", good, False), ("tools", SEED[:32], True)]
    assert not (out / bad).exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, coordinator: Played) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").touch()
    coordinator.known = {"plan": "e" * 32, "complete": True, "experts": []}
    assert "something else than an ensemble" in call("collect", tmp_path / "letters").output
