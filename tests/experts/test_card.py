from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.errors import PierError
from pier_node.experts.card import (
    CARD_FILE,
    ENSEMBLE_FILE,
    WEIGHTS_FILE,
    Card,
    Ensemble,
    Member,
    artefact_name,
    digest_of,
    load_card,
    load_ensemble,
)

PARENT, DOMAIN = "ab" * 32, "cd" * 16


def written(folder: Path, **changed: object) -> Card:
    (folder / WEIGHTS_FILE).write_bytes(b"weights")
    fields: dict[str, object] = {
        "name": artefact_name(PARENT, DOMAIN, "L", 400, 7),
        "domain": "topics",
        "domain_hash": DOMAIN,
        "parent": PARENT,
        "size": "L",
        "steps": 400,
        "seed": 7,
        "tokens": 819_200,
        "flops": 1e12,
        "epochs": 1.9,
        "digest": digest_of(folder),
        "loss": 2.1,
        "parent_loss": 2.4,
        "standard_error": 0.01,
        "accepted": True,
    }
    card = Card.model_validate({**fields, **changed})
    card.save(folder)
    return card


def test_a_card_is_read_back(tmp_path: Path) -> None:
    card = written(tmp_path)
    assert load_card(tmp_path) == card


def test_a_name_never_changes() -> None:
    assert artefact_name(PARENT, DOMAIN, "L", 400, 7) == "6ece2f4127fc75829793796dadb041a6"


TERMS = st.tuples(
    st.sampled_from(["a" * 64, "b" * 64, "b" * 32]),
    st.sampled_from(["c" * 32, "d" * 32]),
    st.sampled_from(["S", "M", "L"]),
    st.integers(1, 30),
    st.integers(0, 30),
)


@given(TERMS, TERMS)
def test_unlike_experts_have_unlike_names(
    one: tuple[str, str, str, int, int], other: tuple[str, str, str, int, int]
) -> None:
    assert (artefact_name(*one) == artefact_name(*other)) is (one == other)


def test_weights_of_another_digest_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"Weights")
    with pytest.raises(PierError, match="not the weights"):
        load_card(tmp_path)


def test_the_name_of_another_expert_is_refused(tmp_path: Path) -> None:
    written(tmp_path, steps=401)
    with pytest.raises(PierError, match="the name is not"):
        load_card(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "expert.pkl"])
def test_a_pickle_is_refused(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(PierError, match="can run code"):
        load_card(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss", float("nan")), ("loss", 1e301), ("steps", 0), ("size", "XL"), ("domain", "../x"), ("more", 1)],
)
def test_a_card_with_a_value_that_is_not_allowed_is_refused(tmp_path: Path, key: str, value: object) -> None:
    written(tmp_path)
    path = tmp_path / CARD_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(PierError, match=f"not a card: {key}"):
        load_card(tmp_path)


@pytest.mark.parametrize("missing", [CARD_FILE, WEIGHTS_FILE])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    written(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(PierError, match=missing):
        load_card(tmp_path)


MEMBERS = (Member(domain="topics", folder="topics"), Member(domain="tools", folder="parent-ab", stands_in=True))


def saved(folder: Path) -> Ensemble:
    for member in MEMBERS:
        (folder / member.folder).mkdir()
        (folder / member.folder / WEIGHTS_FILE).touch()
    ensemble = Ensemble(members=MEMBERS)
    ensemble.save(folder)
    return ensemble


def test_an_ensemble_is_read_back(tmp_path: Path) -> None:
    ensemble = saved(tmp_path)
    assert load_ensemble(tmp_path) == ensemble


@pytest.mark.parametrize("folder", ["../other", "/etc", "a/../../b", "", "a\\b"])
def test_a_folder_outside_is_refused(tmp_path: Path, folder: str) -> None:
    saved(tmp_path)
    (tmp_path / ENSEMBLE_FILE).write_text(json.dumps({"members": [{"domain": "topics", "folder": folder}]}))
    with pytest.raises(PierError, match=r"not an ensemble: members\.0\.folder"):
        load_ensemble(tmp_path)


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    saved(inside)
    (inside / "link").symlink_to(outside)
    Ensemble(members=(Member(domain="topics", folder="link"),)).save(inside)
    with pytest.raises(PierError, match="leads out"):
        load_ensemble(inside)


def test_two_experts_of_one_domain_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    twice = [{"domain": "topics", "folder": "topics"}] * 2
    (tmp_path / ENSEMBLE_FILE).write_text(json.dumps({"members": twice}))
    with pytest.raises(PierError, match="two experts"):
        load_ensemble(tmp_path)


def test_a_member_without_a_model_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "topics" / WEIGHTS_FILE).unlink()
    with pytest.raises(PierError, match="the expert of topics"):
        load_ensemble(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"members": []}', '{"members": [], "more": 1}'])
def test_what_is_no_ensemble_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ENSEMBLE_FILE).write_text(text)
    with pytest.raises(PierError, match="not an ensemble"):
        load_ensemble(tmp_path)


def test_a_folder_without_one_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="No such file"):
        load_ensemble(tmp_path)
