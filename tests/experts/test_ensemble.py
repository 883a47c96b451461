import json
from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.experts.card import WEIGHTS_FILE
from pier_node.experts.ensemble import ENSEMBLE_FILE, Ensemble, Member, load_ensemble

MEMBERS = (Member(domain="topics", folder="topics"), Member(domain="tools", folder="parent-ab", stands_in=True))


def written(folder: Path) -> Ensemble:
    for member in MEMBERS:
        (folder / member.folder).mkdir()
        (folder / member.folder / WEIGHTS_FILE).touch()
    ensemble = Ensemble(members=MEMBERS)
    ensemble.save(folder)
    return ensemble


def test_an_ensemble_is_read_back(tmp_path: Path) -> None:
    ensemble = written(tmp_path)
    assert load_ensemble(tmp_path) == ensemble


@pytest.mark.parametrize("folder", ["../other", "/etc", "a/../../b", "", "a\\b"])
def test_a_folder_outside_is_refused(tmp_path: Path, folder: str) -> None:
    written(tmp_path)
    (tmp_path / ENSEMBLE_FILE).write_text(json.dumps({"members": [{"domain": "topics", "folder": folder}]}))
    with pytest.raises(PierError, match=r"not an ensemble: members\.0\.folder"):
        load_ensemble(tmp_path)


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    written(inside)
    (inside / "link").symlink_to(outside)
    Ensemble(members=(Member(domain="topics", folder="link"),)).save(inside)
    with pytest.raises(PierError, match="leads out"):
        load_ensemble(inside)


def test_two_experts_of_one_domain_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    twice = [{"domain": "topics", "folder": "topics"}] * 2
    (tmp_path / ENSEMBLE_FILE).write_text(json.dumps({"members": twice}))
    with pytest.raises(PierError, match="two experts"):
        load_ensemble(tmp_path)


def test_a_member_without_a_model_is_named(tmp_path: Path) -> None:
    written(tmp_path)
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
