from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from doctor.conftest import CONFIG, TOKEN

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.doctor.standpoint import Standpoint
from pier_node.identity.node import Identity
from pier_node.rounds.folder import SiteRecord, save_run
from pier_node.site.coordinator.enrolment import Enrolment
from pier_node.site.settings import Settings
from pier_proto.v1.peer_pb2 import Site

BETA = Site(node="b" * 16, name="beta", address="10.0.0.2:7700", slot=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a site that was in the run."""
    save_run(tmp_path, CONFIG)
    TOKEN.save(tmp_path)
    SiteRecord(True, 0).with_peers([BETA]).save(tmp_path)
    Identity.load_or_create(tmp_path)
    return tmp_path


def test_a_folder_tells_the_run_its_identity_and_its_peers(folder: Path) -> None:
    (folder / "events.jsonl").write_text(json.dumps({"tokens_per_second": 5.0, "address": "10.0.0.1:7700"}) + "\n")
    here = Standpoint.of(Settings(folder, peers=("10.0.0.3:7700", "10.0.0.2:7700")))
    assert here.config == CONFIG
    assert here.identity.node == Identity.load_or_create(folder).node
    assert here.token == TOKEN
    assert here.credentials is not None
    assert here.addresses == {"10.0.0.3:7700": "", "10.0.0.2:7700": "beta"}
    assert (here.daemon, here.status["tokens_per_second"]) == (None, 5.0)


def test_a_new_site_has_an_identity_for_the_moment(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "new", peers=("10.0.0.3:7700",), token=str(TOKEN))
    assert Standpoint.of(settings).identity.node != Standpoint.of(settings).identity.node
    assert Standpoint.of(settings).config is None
    assert os.listdir(tmp_path) == []


def test_the_run_that_peers_tell_must_be_that_of_the_token(tmp_path: Path) -> None:
    here = Standpoint.of(Settings(tmp_path / "new", peers=("10.0.0.3:7700",), token=str(TOKEN)))
    assert here.in_run(CONFIG).config == CONFIG
    with pytest.raises(PierError, match="the token is for run"):
        here.in_run(RunConfig())


def test_a_site_that_a_coordinator_let_in_needs_no_token(folder: Path) -> None:
    (folder / "run.token").unlink()
    Enrolment("10.0.0.9:7790", "c" * 16, "authority", "certificate").save(folder)
    here = Standpoint.of(Settings(folder, token="pierinvite1-that-it-came-with"))
    assert (here.token, here.config) == (None, CONFIG)
    assert here.credentials is not None
    assert (here.credentials.ca_pem, here.credentials.cert_pem) == (b"authority", b"certificate")
    assert Standpoint.of(Settings(folder, insecure=True)).credentials is None


def test_a_folder_that_lost_its_token_is_said(folder: Path) -> None:
    (folder / "run.token").unlink()
    with pytest.raises(PierError, match="there is no token") as error:
        Standpoint.of(Settings(folder))
    assert "--insecure" in error.value.remedy
    assert Standpoint.of(Settings(folder, insecure=True)).credentials is None
