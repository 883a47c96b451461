"""`pier-node score` on real small transformers and real text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from experts.serving.ensembles import make_ensemble, make_expert

from pier_coordinator.cli import main as coordinator
from pier_node.commands.ensemble import experts_in
from pier_node.experts.card import Card, artefact_name, digest_of
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_held_out, rows_of
from pier_node.experts.scoring import log_probs, spread
from pier_node.experts.sheet import Sheet, Subject, load_sheet, row_hashes
from pier_node.rounds.saved_model import exported_weights
from pier_node.trainer.data.sources import Split

Call = Callable[..., Result]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ensemble(tmp_path_factory.mktemp("scored") / "mine", ["topics", "encodings"])


def evaluate(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(coordinator, ["evaluate", *map(str, words)])


def told(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_is_reported_is_what_the_models_say_of_the_test_split(call: Call, ensemble: Path) -> None:
    report = told(call("score", ensemble, "--rows", "20", "--json"))
    assert report["experts"] == ["topics", "encodings"]
    assert list(report["domains"]) == ["topics", "encodings"]
    rows = spread(rows_of(read_held_out(DomainSection(name="encodings")).texts["test"], 32), 20)
    models = [exported_weights(place).model(CPU) for place in experts_in(ensemble).values()]
    bits = [-float(log_probs(model, rows).mean()) / math.log(2) for model in models]
    found = report["domains"]["encodings"]
    assert found["experts"] == pytest.approx(bits, abs=1e-5)
    assert (found["rows"], found["tokens"]) == (20, 640)
    assert sum(found["prior"]) == pytest.approx(1)
    assert sum(standing["is_best"] for standing in found["standings"].values()) == 1


def test_a_domain_without_an_expert_is_scored_too(call: Call, ensemble: Path, tmp_path: Path) -> None:
    done = call("score", ensemble, "--rows", "5", "--domain", "numbers", "--plot", tmp_path / "scores.svg")
    assert done.exit_code == 0, done.output
    assert "\nnumbers °" in done.output
    assert "\ntopics  " in done.output
    rows = {name: done.output.split(f"\n{name} ")[1].split("\n")[0].split() for name in ("numbers °", "mean °", "mean")}
    assert rows["mean °"] == rows["numbers °"], "it is the only one of which no expert knows"
    assert rows["mean"] != rows["mean °"]
    assert "against its parent" not in done.output, "it is not there"
    assert (tmp_path / "scores.svg").read_text().startswith("<?xml")


def test_in_eighty_columns_names_are_cut_and_no_number_is(tmp_path: Path) -> None:
    names, random = [letter + "x" * 60 for letter in "abc"], np.random.default_rng(0)
    splits: tuple[Split, Split] = ("prior", "test")
    for domain, split in product(names, splits):
        rows = random.integers(0, 256, (4, 9)).astype(np.uint8)
        for expert in names[:2]:
            log_probs = -random.uniform(1, 4, (4, 8)).astype(np.float32)
            subject = Subject(expert=expert, weights=expert[0] * 64, domain=domain, split=split)
            Sheet(subject, log_probs, row_hashes(rows)).save(tmp_path)
    texts = [
        CliRunner(env={"COLUMNS": columns}).invoke(coordinator, ["evaluate", str(tmp_path)]).output
        for columns in ("80", "250")
    ]
    narrow, wide = (
        [line.split()[1:] for line in text.splitlines() if line.startswith(("ax", "bx", "cx", "mean"))]
        for text in texts
    )
    assert len(narrow) == 2 * 5
    assert [line[-8:] for line in narrow] == [line[-8:] for line in wide]


def test_the_sites_sheets_together_say_the_same(call: Call, ensemble: Path, tmp_path: Path) -> None:
    whole = told(call("score", ensemble, "--rows", "10", "--json"))
    for number, name in enumerate(("topics", "encodings")):
        place = make_expert(tmp_path / name, number)
        with_card(place, name)
        other = "encodings" if name == "topics" else "topics"
        words = ["--domain", other, "--rows", "10", "--save", tmp_path / "sheets"]
        done = call("score", place, *words)
        assert done.exit_code == 0, done.output
        assert "4 score sheets" in done.output
    assert told(evaluate(tmp_path / "sheets", "--json")) == reordered(whole)


def test_what_experts_have_forgotten_is_shown_where_their_parent_is(call: Call, tmp_path: Path) -> None:
    make_expert(tmp_path / ("a" * 32), 7)
    names = ("topics", "encodings")
    for number, name in enumerate(names):
        with_card(make_expert(tmp_path / name, number), name)
        words = ["--domain", names[1 - number], "--rows", "10", "--save", tmp_path / "sheets"]
        assert call("score", tmp_path / name, *words).exit_code == 0
    report = told(evaluate(tmp_path / "sheets", "--json"))
    rows = spread(rows_of(read_held_out(DomainSection(name="topics")).texts["test"], 32), 10)
    parent = -float(log_probs(exported_weights(tmp_path / ("a" * 32)).model(CPU), rows).mean()) / math.log(2)
    found = report["domains"]["topics"]
    assert found["forgotten"] == pytest.approx([own - parent for own in found["experts"]], abs=1e-5)
    shown = evaluate(tmp_path / "sheets").output
    assert "bits per byte against its parent" in shown
    gap = report["domains"]["encodings"]["forgotten"][report["experts"].index("topics")]
    (line,) = [line for line in shown.splitlines() if line.startswith("topics") and line.endswith("encodings")]
    assert line.split()[2:4] == [f"{gap:+.3f}"] * 2


def reordered(report: Any) -> Any:
    """Sheets come in the order of their names: encodings first."""
    domains = {
        name: {**found, "prior": found["prior"][::-1], "experts": found["experts"][::-1], "single": 1 - found["single"]}
        for name, found in report["domains"].items()
    }
    means = {key: approx(report[key]) for key in ("mean", "excluded")}
    return {"experts": report["experts"][::-1], "domains": approx(domains), **means}


def approx(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: approx(inner) for key, inner in value.items()}
    return pytest.approx(value, abs=1e-9) if isinstance(value, (float, list)) else value


def with_card(place: Path, domain: str, accepted: bool = True) -> None:
    parent, text = "a" * 32, "b" * 32
    Card(
        name=artefact_name(parent, text, "M", 1, 1),
        domain=domain,
        domain_hash=text,
        parent=parent,
        size="M",
        steps=1,
        seed=1,
        tokens=1,
        flops=1.0,
        epochs=1.0,
        digest=digest_of(place),
        loss=1.0,
        parent_loss=2.0,
        standard_error=0.1,
        accepted=accepted,
    ).save(place)


def test_a_sheet_names_its_weights_and_its_rows(call: Call, ensemble: Path, tmp_path: Path) -> None:
    assert call("score", ensemble, "--rows", "3", "--save", tmp_path / "out").exit_code == 0
    sheets = [load_sheet(path) for path in sorted((tmp_path / "out").iterdir())]
    assert len(sheets) == 8
    first = sheets[0].subject
    assert (first.expert, first.domain, first.split) == ("encodings", "encodings", "prior")
    assert first.weights == digest_of(ensemble / "e1")
    rows = spread(rows_of(read_held_out(DomainSection(name="encodings")).texts["prior"], 32), 3)
    assert np.array_equal(sheets[0].rows, row_hashes(rows))


def test_a_domain_that_there_is_not_is_said(call: Call, ensemble: Path) -> None:
    failed = call("score", ensemble, "--domain", "poetry")
    assert failed.exit_code == 1
    assert "'poetry' is no built-in domain" in failed.output


def test_text_of_a_domain_comes_from_the_configuration(call: Call, tmp_path: Path) -> None:
    folder = make_ensemble(tmp_path / "mine", ["verse", "topics"])
    assert "no built-in domain" in call("score", folder, "--rows", "2").output
    (tmp_path / "verse").mkdir()
    for number in range(200):
        (tmp_path / "verse" / f"{number}.txt").write_text(f"the {number}th line of a poem, which is quite long\n" * 3)
    domains = [f'[[domains]]\nname = "{name}"' for name in ("topics", "encodings")]
    verse = f'[[domains]]\nname = "verse"\nsource = "text"\npath = "{tmp_path / "verse"}"'
    (tmp_path / "experts.toml").write_text("\n".join([*domains, verse]))
    report = told(call("score", folder, "--rows", "4", "--config", tmp_path / "experts.toml", "--json"))
    assert list(report["domains"]) == ["verse", "topics"]


def test_in_the_place_of_an_expert_that_was_refused_its_parent_is_scored(tmp_path: Path) -> None:
    refused, parent = make_expert(tmp_path / "refused", 0), make_expert(tmp_path / ("a" * 32), 1)
    with_card(refused, "topics", accepted=False)
    assert experts_in(refused) == {"topics": parent}


def test_one_expert_alone_needs_a_place_for_its_sheets(call: Call, ensemble: Path) -> None:
    with_card(ensemble / "e0", "topics")
    failed = call("score", ensemble / "e0")
    assert failed.exit_code == 1
    assert "--save" in failed.output


def test_a_folder_without_sheets_is_said(call: Call, tmp_path: Path) -> None:
    failed = evaluate(tmp_path)
    assert failed.exit_code == 1
    assert "there is no score sheet" in failed.output
