"""The connection of a site to its coordinator: what goes wrong on it, against the real service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from coordinator.cases import ALICE, BOB, OWN, TOKEN, Running, pulse, register_request, running

from pier_node.identity.certificates import credentials
from pier_node.site.coordinator.link import Link, NoLease, Refused, Unreachable
from pier_proto.v1.coordinator_pb2 import HeartbeatRequest, WatchRequest

ANSWER = 10.0


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
    lease = (await link.register(register_request(ALICE), ANSWER)).lease
    for _ in range(3):
        assert (await link.heartbeat(beat(lease), ANSWER)).order == 1
    await run.coordinator.order("pause", [ALICE.node])
    assert (await link.heartbeat(beat(lease), ANSWER)).order == 2
    await link.close()


async def test_a_lease_that_is_not_known_is_told_from_a_refusal(run: Running) -> None:
    link = link_to(run.port)
    with pytest.raises(NoLease):
        await link.heartbeat(beat(b"forgotten"), ANSWER)
    lease = (await link.register(register_request(ALICE), ANSWER)).lease
    assert (await link.heartbeat(beat(lease), ANSWER)).order == 1, "the stream is begun anew"
    await run.coordinator.revoke(ALICE.node)
    with pytest.raises(Refused, match="revoked"):
        await link.heartbeat(beat(lease), ANSWER)
    with pytest.raises(Refused, match="revoked"):
        await link.register(register_request(ALICE), ANSWER)
    await link.close()


async def test_a_stranger_is_refused(run: Running) -> None:
    link = Link(f"127.0.0.1:{run.port}", OWN.node, credentials(BOB, TOKEN))
    with pytest.raises(Refused, match="invite"):
        await link.register(register_request(BOB), ANSWER)
    await link.close()


async def test_a_coordinator_that_restarts_is_found_again(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        link, port = link_to(run.port), run.port
        lease = (await link.register(register_request(ALICE), ANSWER)).lease
        assert (await link.heartbeat(beat(lease), ANSWER)).order == 1
    for _ in range(2):
        with pytest.raises(Unreachable):
            await link.heartbeat(beat(lease), ANSWER)
    async with running(tmp_path, port=port):
        answered = False
        while not answered:  # it connects again within a second
            try:
                answered = (await link.heartbeat(beat(lease), ANSWER)).order == 1
            except Unreachable:
                continue
        await link.close()


async def test_nobody_there_and_nothing_said() -> None:
    link = link_to(1)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await link.register(register_request(ALICE), ANSWER)
    with pytest.raises(Unreachable):
        await link.heartbeat(beat(b"lease"), 0.0)
    with pytest.raises(Unreachable):
        async for _ in link.watch(WatchRequest(lease=b"lease")):
            pass
    await link.close()
