"""An invite becomes a certificate: a site against the coordinator's real service, over real TLS."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from coordinator.cases import ALICE, BOB, CONFIG, OWN, TOKEN, Running, running

from pier_coordinator.store.rows import InviteRow
from pier_node.base.errors import PierError
from pier_node.identity.certificates import node_id_of_certificate
from pier_node.identity.invite import Invite
from pier_node.outer.deadline import Backoff
from pier_node.site.coordinator import enrolment
from pier_node.site.coordinator.enrolment import Enrolment, enrol, enrol_patiently
from pier_node.site.coordinator.link import Unreachable


async def invited(run: Running, uses: int = 1) -> Invite:
    invite = Invite.new(OWN.key.public_key())
    run.wall.now = time.time()
    await run.coordinator.invite(
        InviteRow(invite.id, None, run.wall.now + 3600, uses, invite.certificate, run.wall.now)
    )
    return invite


async def test_an_invite_brings_a_certificate_and_the_run(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        place, config = await enrol(f"127.0.0.1:{run.port}", await invited(run), ALICE, "lab-a")
        assert config == CONFIG
        assert node_id_of_certificate(place.certificate.encode()) == ALICE.node
        assert place.node == OWN.node
        async with run.caller(place.credentials(ALICE)) as caller:
            assert (await caller.register(ALICE, time=run.wall.now)).lease


async def test_an_invite_is_used_up(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        invite, address = await invited(run), f"127.0.0.1:{run.port}"
        await enrol(address, invite, ALICE, "lab-a")
        await enrol(address, invite, ALICE, "lab-a")
        with pytest.raises(PierError, match=r"does not let this site in: .*was used already") as error:
            await enrol(address, invite, BOB, "lab-b")
        assert "pier-coordinator invite" in error.value.remedy


async def test_nobody_else_is_taken_for_the_coordinator(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        of_another = Invite.new(BOB.key.public_key())
        with pytest.raises(PierError, match="is not the coordinator that this invite is from"):
            await enrol(f"127.0.0.1:{run.port}", of_another, ALICE, "lab-a")


async def test_an_invite_that_the_coordinator_never_made(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        with pytest.raises(Unreachable):
            await enrol(f"127.0.0.1:{run.port}", Invite.new(OWN.key.public_key()), ALICE, "lab-a")


async def test_a_coordinator_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "PATIENCE", 0.0)
    monkeypatch.setattr("pier_node.outer.deadline.Backoff", lambda **_: Backoff(first=0.0))
    with pytest.raises(PierError, match=r"the coordinator does not answer: 127\.0\.0\.1:1: Connection refused"):
        await enrol_patiently("127.0.0.1:1", Invite.new(OWN.key.public_key()), ALICE, "lab-a")


def test_a_place_is_kept(tmp_path: Path) -> None:
    assert Enrolment.load(tmp_path) is None
    place = Enrolment("10.0.0.1:7790", OWN.node, "authority", "certificate")
    place.save(tmp_path)
    assert Enrolment.load(tmp_path) == place
    assert TOKEN.secret.hex() not in (tmp_path / enrolment.FILE).read_text()
    (tmp_path / enrolment.FILE).write_text("{")
    with pytest.raises(PierError, match=enrolment.FILE) as error:
        Enrolment.load(tmp_path)
    assert "a new invite" in error.value.remedy
