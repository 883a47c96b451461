from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from doctor.conftest import CONFIG, TOKEN, Peer

from bench.ports import free_port
from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig
from pier_node.doctor import links, machine
from pier_node.doctor.examination import Standpoint, examine
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict
from pier_node.identity.node import Identity, Token
from pier_node.rounds.folder import SiteRecord, save_run
from pier_node.site.coordinator.link import Enrolment
from pier_node.site.settings import Settings
from pier_node.wire.probe import Ask, LinkSpeed
from pier_proto.v1.peer_pb2 import Site

NewSite = Callable[..., Settings]


async def found(settings: Settings) -> dict[tuple[str, str], Finding]:
    """Findings by site and check."""
    findings = await examine(settings)
    by_name = {(finding.site, finding.check): finding for finding in findings}
    assert len(by_name) == len(findings)
    return by_name


def problems(findings: dict[tuple[str, str], Finding]) -> list[tuple[str, str]]:
    return [name for name, finding in findings.items() if finding.verdict is Verdict.PROBLEM]


async def test_a_site_that_could_join(new_site: NewSite) -> None:
    async with Peer("alpha").running() as address:
        settings = new_site(address)
        findings = await found(settings)
    assert list(findings) == [
        (THIS_SITE, "address"),
        (THIS_SITE, "disk"),
        (THIS_SITE, "memory"),
        (THIS_SITE, "workers"),
        (THIS_SITE, "boundary"),
        (THIS_SITE, "utilisation"),
        ("alpha", "reach it"),
        ("alpha", "reached by it"),
        ("alpha", "link"),
        ("alpha", "clock"),
    ]
    assert not problems(findings)
    assert f"answers at {address}" in findings["alpha", "reach it"].detail
    assert findings["alpha", "reached by it"].detail == f"it reaches this site at {settings.listen}"
    assert findings["alpha", "link"].values["up_bytes_per_second"] > 0
    assert abs(findings["alpha", "clock"].values["clock_ahead_seconds"]) < 1
    assert findings[THIS_SITE, "utilisation"].values["exchange_seconds"] > 0
    assert not settings.folder.exists(), "looking changes nothing"


async def test_each_worker_on_the_cpu_has_memory_of_its_own(new_site: NewSite) -> None:
    async with Peer("alpha").running() as address:
        one, three = [
            (await found(replace(new_site(address), workers=count)))[THIS_SITE, "memory"].values["most_bytes"]
            for count in (1, 3)
        ]
    assert three > one


async def test_sites_that_others_name_are_visited_too(new_site: NewSite) -> None:
    gone = Site(node="f" * 16, name="gone", address=f"127.0.0.1:{free_port()}")
    beta = Peer("beta")
    async with beta.running(), Peer("alpha", names=[beta.site, gone]).running() as address:
        findings = await found(new_site(address))
    assert findings["beta", "reached by it"].verdict is Verdict.OK
    assert problems(findings) == [(gone.address, "reach it")]
    assert findings[gone.address, "reach it"].detail == "connection refused: nothing listens there"
    assert "Start that site" in findings[gone.address, "reach it"].remedy


async def test_a_closed_port(new_site: NewSite) -> None:
    """This site reaches its peer, and the peer does not reach this site."""
    closed = free_port()
    async with Peer("alpha").running() as address:
        findings = await found(new_site(address, advertise=f"127.0.0.1:{closed}"))
    assert problems(findings) == [("alpha", "reached by it")]
    finding = findings["alpha", "reached by it"]
    assert finding.detail == f"127.0.0.1:{closed}: connection refused: nothing listens there"
    assert f"--listen 0.0.0.0:{closed}" in finding.remedy
    assert "--advertise" in finding.remedy


async def test_a_wrong_token(new_site: NewSite) -> None:
    other = Token(bytes(32), TOKEN.run)
    async with Peer("alpha").running() as address:
        findings = await found(new_site(address, token=str(other)))
    assert problems(findings) == [(address, "reach it")]
    assert findings[address, "reach it"].detail == "its certificate is of another run: the tokens differ"
    assert "Use the token" in findings[address, "reach it"].remedy


async def test_tls_at_one_end_only(new_site: NewSite) -> None:
    async with Peer("alpha").running() as address:
        findings = await found(new_site(address, token=None, insecure=True))
        assert problems(findings) == [(address, "reach it")]
        assert "--insecure" in findings[address, "reach it"].remedy
    async with Peer("alpha", token=None).running() as address:
        assert not problems(await found(new_site(address, token=None, insecure=True)))


async def test_another_run(new_site: NewSite, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "other"\n')
    async with Peer("alpha", token=None).running() as address:
        findings = await found(new_site(address, token=None, insecure=True, run=path))
    assert problems(findings) == [(address, "reach it")]
    assert "different runs" in findings[address, "reach it"].remedy


@pytest.mark.parametrize(("ahead", "words"), [(3600.0, "3,600 s ahead of"), (-90.0, "90 s behind")])
async def test_clock_skew(new_site: NewSite, ahead: float, words: str) -> None:
    async with Peer("alpha", clock=lambda: time.time() + ahead).running() as address:
        findings = await found(new_site(address))
    assert problems(findings) == [("alpha", "clock")]
    assert words in findings["alpha", "clock"].detail
    assert "NTP" in findings["alpha", "clock"].remedy


async def test_low_disk_and_low_memory(new_site: NewSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_disk", lambda folder: 1000)
    monkeypatch.setattr(machine, "free_memory", lambda: 2000)
    async with Peer("alpha").running() as address:
        findings = await found(new_site(address))
    assert problems(findings) == [(THIS_SITE, "disk"), (THIS_SITE, "memory")]
    assert findings[THIS_SITE, "disk"].remedy.startswith("Free ")


async def test_a_slow_link(new_site: NewSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 8 kbit/s, for a site that trained at 100,000 tokens a second."""

    async def slow(ask: Ask) -> LinkSpeed:
        return LinkSpeed(0.3, 0.0, up=1000.0, down=1e6)

    monkeypatch.setattr(links, "measure", slow)
    folder = tmp_path / "new"
    folder.mkdir()
    event = {"round": 3, "tokens_per_second": 100_000.0, "utilisation": 0.2}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    async with Peer("alpha").running() as address:
        findings = await found(new_site(address))
    assert problems(findings) == [(THIS_SITE, "utilisation")]
    finding = findings[THIS_SITE, "utilisation"]
    assert finding.values["utilisation"] < 0.1
    assert "H = " in finding.remedy
    assert "20 % so far" in finding.detail


async def test_a_port_that_is_taken(new_site: NewSite) -> None:
    async with Peer("alpha").running() as address:
        findings = await found(new_site(address, listen=address))
    assert problems(findings) == [(THIS_SITE, "address")]
    assert "--listen" in findings[THIS_SITE, "address"].remedy
    assert ("alpha", "reached by it") not in findings


async def test_a_peer_that_is_measured_too_often_is_not_called_broken(
    new_site: NewSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pier_node.wire.probe.ALLOWANCE", 1000)
    async with Peer("alpha").running() as address:
        findings = await found(new_site(address))
    assert not problems(findings)
    assert "measured enough for now" in findings["alpha", "measure it"].detail


async def test_a_site_that_stopped_knows_its_peers(tmp_path: Path) -> None:
    """Its folder says all that is needed."""
    alpha, folder = Peer("alpha"), tmp_path / "site"
    folder.mkdir()
    TOKEN.save(folder)
    save_run(folder, CONFIG)
    Identity.load_or_create(folder)
    async with alpha.running():
        SiteRecord(False, 1).with_peers([alpha.site]).save(folder)
        findings = await found(Settings(folder, listen=f"127.0.0.1:{free_port()}"))
    assert not problems(findings)
    assert findings["alpha", "reached by it"].verdict is Verdict.OK


async def test_what_contradicts_itself_is_an_error(new_site: NewSite, tmp_path: Path) -> None:
    with pytest.raises(PierError, match="does not know which run"):
        await examine(Settings(tmp_path / "new"))
    with pytest.raises(PierError, match="needs the --token"):
        await examine(replace(new_site("127.0.0.1:9"), token=None))
    path = tmp_path / "run.toml"
    path.write_text("[run]\nsites = 7\n")
    with pytest.raises(PierError, match="the token is for run"):
        await examine(new_site("127.0.0.1:9", run=path))


async def test_a_run_to_be_founded_is_looked_at_without_peers(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nsites = 2\n[model]\npreset = "llama-tiny"\n')
    findings = await found(Settings(tmp_path / "new", run=path, listen=f"127.0.0.1:{free_port()}"))
    assert not problems(findings)
    assert findings[THIS_SITE, "utilisation"].detail == "no link to another site could be measured"
    assert os.listdir(tmp_path) == ["run.toml"]


async def test_a_site_of_a_pipeline_needs_room_for_a_stage(tmp_path: Path) -> None:
    path, needed, disk = tmp_path / "run.toml", [], []
    for stages in (1, 4):
        path.write_text(f'[run]\nsites = 4\n[model]\npreset = "llama-1m"\n[pipeline]\nstages = {stages}\n')
        findings = await found(Settings(tmp_path / "new", run=path, listen=f"127.0.0.1:{free_port()}"))
        needed.append(findings[THIS_SITE, "memory"].values["most_bytes"])
        disk.append(findings[THIS_SITE, "disk"].detail)
    assert needed[1] < 0.7 * needed[0]
    assert [detail.split(" need")[0] for detail in disk] == ["checkpoints", "a stage"]
    assert (THIS_SITE, "utilisation") not in findings, "one replica of each stage averages nothing"


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


def test_a_folder_without_its_key_is_looked_at_without_changes(folder: Path) -> None:
    (folder / "node.key").unlink()
    before = sorted(os.listdir(folder))
    Standpoint.of(Settings(folder))
    assert sorted(os.listdir(folder)) == before


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
    with pytest.raises(PierError, match=r"run\.token is gone") as error:
        Standpoint.of(Settings(folder))
    assert "--insecure" in error.value.remedy
    assert Standpoint.of(Settings(folder, insecure=True)).credentials is None
