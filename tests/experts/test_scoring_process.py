"""Scoring by order: real small transformers, real text, and once in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from experts.serving.ensembles import make_expert

from pier_node.base.errors import PierError
from pier_node.experts import scoring
from pier_node.experts.card import Card, artefact_name, digest_of
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_held_out, rows_of
from pier_node.experts.scoring import log_probs, spread
from pier_node.experts.scoring_process import Said, said, scored
from pier_node.experts.sheet import ScoredDomain, ScoringOrder, load_sheet
from pier_node.rounds.weights import Weights, exported_weights

TEXT = "b" * 32


def expert(folder: Path, domain: str, number: int, accepted: bool = True) -> str:
    """Its name, which is that of its folder."""
    parent = "a" * 32
    name = artefact_name(parent, TEXT, "M", number + 1, 1)
    place = make_expert(folder / name, number)
    losses = {"loss": 1.0, "parent_loss": 2.0, "standard_error": 0.1, "accepted": accepted, "digest": digest_of(place)}
    about = {"name": name, "domain": domain, "domain_hash": TEXT, "parent": parent, "size": "M", "steps": number + 1}
    Card.model_validate({**about, **losses, "seed": 1, "tokens": 1, "flops": 1.0, "epochs": 1.0}).save(place)
    return name


def order(names: Sequence[str], *domains: tuple[str, str]) -> ScoringOrder:
    asked = tuple(ScoredDomain(section=DomainSection(name=name), digest=digest) for name, digest in domains)
    return ScoringOrder(id="ab" * 16, experts=tuple(names), domains=asked, rows=3)


def test_each_expert_is_scored_on_each_split_of_each_domain(tmp_path: Path) -> None:
    names = [expert(tmp_path, domain, number) for number, domain in enumerate(("topics", "encodings"))]
    digest = read_held_out(DomainSection(name="topics")).digest
    lines = list(said(order(names, ("topics", digest), ("encodings", "")), tmp_path, tmp_path))
    assert [(line.expert, line.domain) for line in lines] == [
        (name, domain) for name in names for domain in ("topics", "topics", "encodings", "encodings")
    ]
    sheets = [load_sheet(Path(line.sheet)) for line in lines]
    assert {sheet.log_probs.shape for sheet in sheets} == {(3, 32)}
    assert sheets[4].subject.expert == "encodings"
    assert sheets[4].subject.weights == digest_of(tmp_path / names[1])


def test_for_one_that_was_refused_its_parent_is_scored(tmp_path: Path) -> None:
    parent = make_expert(tmp_path / ("a" * 32), 7)
    name = expert(tmp_path, "topics", 0, accepted=False)
    (first, _) = said(order([name], ("topics", "")), tmp_path, tmp_path)
    assert load_sheet(Path(first.sheet)).subject.weights == digest_of(parent)
    assert load_sheet(Path(first.sheet)).parent is None, "it has forgotten nothing"


def test_what_experts_branched_from_is_scored_once_on_the_test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = make_expert(tmp_path / ("a" * 32), 7)
    names = [expert(tmp_path, domain, number) for number, domain in enumerate(("topics", "encodings"))]
    opened: list[Path] = []

    def noted(place: Path) -> Weights:
        opened.append(place)
        return exported_weights(place)

    monkeypatch.setattr(scoring, "exported_weights", noted)
    lines = list(said(order(names, ("topics", "")), tmp_path, tmp_path))
    by_split = {(line.expert, sheet.subject.split): sheet for line in lines for sheet in [load_sheet(Path(line.sheet))]}
    rows = spread(rows_of(read_held_out(DomainSection(name="topics")).texts["test"], 32), 3)
    wanted = log_probs(exported_weights(parent).model(torch.device("cpu")), rows).sum(axis=1)
    for name in names:
        assert by_split[name, "prior"].parent is None
        found = by_split[name, "test"].parent
        assert found is not None
        assert found.tolist() == pytest.approx(wanted.tolist())
    assert opened == [tmp_path / names[0], parent, tmp_path / names[1]]


def test_a_damaged_parent_costs_nothing_but_what_it_would_tell(tmp_path: Path) -> None:
    (make_expert(tmp_path / ("a" * 32), 7) / "config.json").write_text("")
    lines = list(said(order([expert(tmp_path, "topics", 0)], ("topics", "")), tmp_path, tmp_path))
    assert [load_sheet(Path(line.sheet)).parent for line in lines] == [None, None]


def test_another_text_and_a_lost_expert_are_told_and_the_rest_is_scored(tmp_path: Path) -> None:
    good, lost = expert(tmp_path, "topics", 0), "ef" * 16
    lines = list(said(order([good, lost], ("topics", "00" * 16), ("encodings", "")), tmp_path, tmp_path))
    assert [(line.expert, line.domain, bool(line.sheet)) for line in lines] == [
        (lost, "", False),
        (good, "topics", False),
        (good, "encodings", True),
        (good, "encodings", True),
    ]
    assert "not the one that was planned with" in lines[1].problem


async def test_it_is_done_in_a_process_of_its_own(tmp_path: Path) -> None:
    name = expert(tmp_path / "experts", "topics", 0)
    asked = order([name], ("encodings", ""))
    async with aclosing(scored(asked, tmp_path / "experts", tmp_path / "out")) as lines:
        found = [line async for line in lines]
    assert [(line.expert, line.domain, line.problem) for line in found] == [(name, "encodings", "")] * 2
    assert load_sheet(Path(found[0].sheet)).subject.split == "prior"


async def test_a_process_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(PierError, match="exit code 1"):
        await anext(aiter(scored(order([], ("topics", "")), tmp_path, tmp_path / "out")), Said(""))
