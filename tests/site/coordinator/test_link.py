"""The connection of a site to its coordinator: what goes wrong on it, against the real service."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from coordinator.cases import ALICE, BOB, CONFIG, NOW, OWN, PATIENCE, TOKEN, Running, pulse, register_request, running

from pier_coordinator.store.sites import InviteRow
from pier_node.base.errors import PierError
from pier_node.base.patience import Backoff
from pier_node.identity.certificates import credentials, node_id_of_certificate
from pier_node.identity.invite import Invite
from pier_node.site.coordinator import link
from pier_node.site.coordinator.link import Enrolment, Link, NoLease, Refused, Unreachable, enrol, enrol_patiently
from pier_proto.v1.coordinator_pb2 import HeartbeatRequest, WatchRequest


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        yield run


def link_to(port: int) -> Link:
    return Link(f"127.0.0.1:{port}", OWN.node, credentials(ALICE, TOKEN))


def beat(lease: bytes) -> HeartbeatRequest:
    return HeartbeatRequest(lease=lease, pulse=pulse(ALICE), order=1)


async def test_heartbeats_go_on_over_one_stream(run: Running) -> None:
    link = link_to(run.port)
    lease = (await link.register(register_request(ALICE), PATIENCE)).lease
    for _ in range(3):
        assert (await link.heartbeat(beat(lease), PATIENCE)).order == 1
    await run.coordinator.order("pause", [ALICE.node])
    assert (await link.heartbeat(beat(lease), PATIENCE)).order == 2
    await link.close()


async def test_a_lease_that_is_not_known_is_told_from_a_refusal(run: Running) -> None:
    link = link_to(run.port)
    with pytest.raises(NoLease):
        await link.heartbeat(beat(b"forgotten"), PATIENCE)
    lease = (await link.register(register_request(ALICE), PATIENCE)).lease
    assert (await link.heartbeat(beat(lease), PATIENCE)).order == 1, "the stream is begun anew"
    await run.coordinator.revoke(ALICE.node)
    with pytest.raises(Refused, match="revoked"):
        await link.heartbeat(beat(lease), PATIENCE)
    with pytest.raises(Refused, match="revoked"):
        await link.register(register_request(ALICE), PATIENCE)
    await link.close()


async def test_a_wrong_clock_is_no_refusal_for_good(run: Running) -> None:
    link = link_to(run.port)
    with pytest.raises(Unreachable, match="your clock is 2 hours ahead of the coordinator's"):
        await link.register(register_request(ALICE, time=NOW + 7200), PATIENCE)
    assert (await link.register(register_request(ALICE), PATIENCE)).lease
    await link.close()


async def test_a_stranger_is_refused(run: Running) -> None:
    link = Link(f"127.0.0.1:{run.port}", OWN.node, credentials(BOB, TOKEN))
    with pytest.raises(Refused, match="invite"):
        await link.register(register_request(BOB), PATIENCE)
    await link.close()


async def test_a_coordinator_that_restarts_is_found_again(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        link, port = link_to(run.port), run.port
        lease = (await link.register(register_request(ALICE), PATIENCE)).lease
        assert (await link.heartbeat(beat(lease), PATIENCE)).order == 1
    for _ in range(2):
        with pytest.raises(Unreachable):
            await link.heartbeat(beat(lease), PATIENCE)
    async with running(tmp_path, port=port):
        answered = False
        while not answered:  # it connects again within a second
            try:
                answered = (await link.heartbeat(beat(lease), PATIENCE)).order == 1
            except Unreachable:
                continue
        await link.close()


async def test_nobody_there_and_nothing_said() -> None:
    link = link_to(1)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await link.register(register_request(ALICE), PATIENCE)
    with pytest.raises(Unreachable):
        await link.heartbeat(beat(b"lease"), 0.0)
    with pytest.raises(Unreachable):
        async for _ in link.watch(WatchRequest(lease=b"lease")):
            pass
    await link.close()


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
        with pytest.raises(PierError, match=r"does not let this site in: this invite was used already\n") as error:
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
    monkeypatch.setattr(link, "PATIENCE", 0.0)
    monkeypatch.setattr("pier_node.base.patience.Backoff", lambda **_: Backoff(first=0.0))
    with pytest.raises(PierError, match=r"the coordinator does not answer: 127\.0\.0\.1:1: Connection refused"):
        await enrol_patiently("127.0.0.1:1", Invite.new(OWN.key.public_key()), ALICE, "lab-a")


def test_a_place_is_kept(tmp_path: Path) -> None:
    assert Enrolment.load(tmp_path) is None
    place = Enrolment("10.0.0.1:7790", OWN.node, "authority", "certificate")
    place.save(tmp_path)
    assert Enrolment.load(tmp_path) == place
    assert TOKEN.secret.hex() not in (tmp_path / link.FILE).read_text()
    (tmp_path / link.FILE).write_text("{")
    with pytest.raises(PierError, match=link.FILE) as error:
        Enrolment.load(tmp_path)
    assert "a new invite" in error.value.remedy
