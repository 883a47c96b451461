"""Scores of rows; and scoring by order: real small transformers, real text, and once in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from experts.serving.ensembles import make_expert

from pier_node.base.errors import PierError
from pier_node.config.run import ModelSection
from pier_node.experts import scoring
from pier_node.experts.card import Card, artefact_name, digest_of
from pier_node.experts.config import DomainSection
from pier_node.experts.domains import read_held_out, rows_of
from pier_node.experts.scoring import BATCH, Said, log_probs, said, scored, spread
from pier_node.experts.sheet import ScoredDomain, ScoringOrder, load_sheet
from pier_node.rounds.saved_model import Weights, exported_weights
from pier_node.trainer.model.decoder import Decoder

CONFIG = ModelSection(preset="llama-tiny", context=16)
TEXT = bytes(np.random.default_rng(1).integers(0, 256, 16 * 70 + 9).astype(np.uint8))


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(3)
    return Decoder(CONFIG)


@torch.no_grad()
def test_every_byte_gets_what_the_whole_distribution_gives_it(model: Decoder) -> None:
    rows = rows_of(TEXT, 16)
    found = log_probs(model, rows)
    assert found.dtype == np.float32
    assert found.shape == (70, 16)
    for row in (0, BATCH - 1, BATCH, 69):  # batches do not mix rows up
        whole = torch.log_softmax(model(torch.from_numpy(rows[row : row + 1, :-1].astype(np.int64)))[0], dim=-1)
        assert whole.exp().sum(dim=-1).numpy() == pytest.approx(np.ones(16), abs=1e-5)  # property 3
        np.testing.assert_allclose(found[row], whole.numpy()[np.arange(16), rows[row, 1:]], atol=1e-5)


def test_a_row_knows_nothing_of_the_one_before(model: Decoder) -> None:
    rows = rows_of(TEXT, 16)
    np.testing.assert_allclose(log_probs(model, rows[5:7]), log_probs(model, rows)[5:7], atol=1e-6)


def test_every_batch_is_told(model: Decoder) -> None:
    told: list[int] = []
    log_probs(model, rows_of(TEXT, 16), told.append)
    assert told == [BATCH, BATCH, 70 - 2 * BATCH]


def test_fewer_rows_are_from_all_over_the_text() -> None:
    rows = rows_of(TEXT, 16)
    assert spread(rows, 7).tolist() == rows[::10].tolist()
    assert spread(rows, 0) is rows
    assert spread(rows, 70) is rows
    assert len(spread(rows, 69)) == 69


DIGEST = "b" * 32


def expert(folder: Path, domain: str, number: int, accepted: bool = True) -> str:
    """Its name, which is that of its folder."""
    parent = "a" * 32
    name = artefact_name(parent, DIGEST, "M", number + 1, 1)
    place = make_expert(folder / name, number)
    losses = {"loss": 1.0, "parent_loss": 2.0, "standard_error": 0.1, "accepted": accepted, "digest": digest_of(place)}
    about = {"name": name, "domain": domain, "domain_hash": DIGEST, "parent": parent, "size": "M", "steps": number + 1}
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


def test_where_no_expert_can_be_scored_each_is_told(tmp_path: Path) -> None:
    lines = list(said(order(["ef" * 16, "cd" * 16], ("topics", "")), tmp_path, tmp_path))
    assert [(line.expert, bool(line.problem)) for line in lines] == [("ef" * 16, True), ("cd" * 16, True)]


def test_a_refused_expert_without_its_parent_keeps_no_other_from_being_scored(tmp_path: Path) -> None:
    names = [expert(tmp_path, "topics", 0, accepted=False), expert(tmp_path, "encodings", 1)]
    lines = list(said(order(names, ("topics", "")), tmp_path, tmp_path))
    assert [(line.expert, bool(line.sheet)) for line in lines] == [
        (names[0], False),
        (names[1], True),
        (names[1], True),
    ]


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
