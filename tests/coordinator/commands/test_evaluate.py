"""`pier-coordinator evaluate` with a coordinator that is played; its sheets are real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from coordinator.expert_cases import sheet

from pier_coordinator.cli import main
from pier_coordinator.commands import evaluate
from pier_coordinator.commands.client import Client

ROW = {"site": "lab-a", "there": True, "trained": True, "sheets": 4, "of": 4, "problem": ""}
ID = "ab" * 16


class Played:
    """Asked how far it is, it says one thing after the other."""

    def __init__(self, folder: Path) -> None:
        self.home = type("Home", (), {"folder": folder})
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.told: list[dict[str, Any]] = []

    def act(self, action: str, **body: Any) -> dict[str, Any]:
        if action != "evaluation":
            self.asked.append((action, body))
            return {"ok": True}
        return self.told.pop(0)

    def say(self, finished: bool, *rows: dict[str, Any], left_out: dict[str, str] | None = None) -> None:
        self.told.append({"id": ID, "finished": finished, "experts": [*rows], "left_out": left_out or {}})


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Played:
    played = Played(tmp_path)
    monkeypatch.setattr(Client, "of", lambda _folder: played)
    monkeypatch.setattr(evaluate, "LOOK", 0.0)
    (tmp_path / "scores" / ID).mkdir(parents=True)
    return played


def scored(coordinator: Played, expert: str, weights: str, *domains: str) -> None:
    for domain in domains:
        for split in ("prior", "test"):
            sheet(expert, domain, split, weights).save(coordinator.home.folder / "scores" / ID)  # type: ignore[attr-defined]


def call(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["evaluate", *words])


def test_it_waits_for_the_sites_and_prints_what_they_say(coordinator: Played) -> None:
    for name, weights in (("topics", "11" * 32), ("network", "22" * 32)):
        scored(coordinator, name, weights, "topics", "network", "numbers")
    away = {**ROW, "domain": "network", "site": "lab-b", "there": False, "sheets": 2}
    coordinator.say(False, {**ROW, "domain": "topics"}, away)
    coordinator.say(False, {**ROW, "domain": "topics"}, away)
    coordinator.say(True, {**ROW, "domain": "topics"}, {**ROW, "domain": "network"})
    done = call("--domain", "numbers", "--rows", "3", "--patience", "60", "--json")
    assert done.exit_code == 0, done.output
    ((action, body),) = coordinator.asked
    assert (action, body["rows"], body["patience"]) == ("evaluate", 3, 60.0)
    assert body["domains"] == [{"name": "numbers", "source": "builtin", "path": "", "text_field": "text"}]
    assert done.stderr.count("lab-b is not there: it must be started again") == 1
    report = json.loads(done.stdout)
    assert (report["experts"], list(report["domains"])) == (["topics", "network"], ["topics", "network", "numbers"])


def test_what_is_missing_is_named_and_the_rest_is_compared(coordinator: Played) -> None:
    scored(coordinator, "topics", "11" * 32, "topics", "network", "numbers")
    scored(coordinator, "network", "22" * 32, "topics", "network")
    scored(coordinator, "tools", "33" * 32, "topics")
    rows = [{**ROW, "domain": "topics"}, {**ROW, "domain": "network"}]
    gone = {**ROW, "domain": "tools", "problem": "lab-c: is not there for 60 s"}
    coordinator.say(True, *rows, gone, left_out={"numbers": "no such file"})
    done = call("--json")
    assert done.exit_code == 3
    assert "The expert of tools is missing: lab-c: is not there for 60 s" in done.stderr
    assert "numbers is left out: no such file" in done.stderr
    report = json.loads(done.stdout)
    assert (report["experts"], list(report["domains"])) == (["topics", "network"], ["topics", "network"])
    assert report["missing"] == {"tools": "lab-c: is not there for 60 s"}


def test_a_coordinator_that_was_restarted_knows_of_no_evaluation(coordinator: Played) -> None:
    coordinator.say(False, {**ROW, "domain": "topics", "sheets": 2})
    coordinator.told.append({"ok": True})
    failed = call()
    assert failed.exit_code == 1
    assert "Error: the evaluation has ended: the coordinator was restarted" in failed.output


def test_what_a_site_says_is_no_markup(coordinator: Played) -> None:
    scored(coordinator, "topics", "11" * 32, "topics")
    gone = {**ROW, "domain": "tools", "problem": "no folder /srv/[/tools]"}
    coordinator.say(True, {**ROW, "domain": "topics"}, gone)
    assert "no folder /srv/[/tools]" in call("--json").stderr


def test_a_parent_that_stands_in_for_two_counts_once(coordinator: Played) -> None:
    for name, weights in (("topics", "11" * 32), ("network", "77" * 32), ("tools", "77" * 32)):
        scored(coordinator, name, weights, "topics", "network", "tools")
    coordinator.say(True, *({**ROW, "domain": name} for name in ("topics", "network", "tools")))
    report = json.loads(call("--json").stdout)
    assert (report["experts"], list(report["domains"])) == (["topics", "network"], ["topics", "network", "tools"])


def test_when_nothing_was_scored_it_says_so(coordinator: Played) -> None:
    coordinator.say(True, {**ROW, "domain": "topics", "problem": "lab-a: is not there for 60 s"})
    failed = call()
    assert failed.exit_code == 1
    assert "no expert was scored" in failed.output


def test_a_domain_that_is_not_known_is_said_before_anybody_is_asked(coordinator: Played) -> None:
    failed = call("--domain", "poetry")
    assert failed.exit_code == 1
    assert "'poetry' is no built-in domain" in failed.output
    assert coordinator.asked == []
