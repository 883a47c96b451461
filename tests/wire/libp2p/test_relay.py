from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from wire.sites import ALICE, BOB, CAROL, LEAVING, QUICK, RUN, Sites, ack, port_of

from pier_node.wire.addresses import Choice, choose_address, parse_routes
from pier_node.wire.carrier import HELLO, LEAVE, PeerLost
from pier_node.wire.libp2p import carrier as hivemind_carrier
from pier_node.wire.libp2p import host as hivemind_host
from pier_node.wire.libp2p.carrier import HivemindCarrier
from pier_node.wire.libp2p.host import NoWay
from pier_node.wire.libp2p.p2pd import ASKING
from pier_node.wire.libp2p.relay import Places, reserve
from pier_node.wire.links import SiteCarrier
from pier_node.wire.probe import ProbeServer
from pier_proto.v1.peer_pb2 import Ack, HelloReply, HelloRequest, Site

pytestmark = pytest.mark.processes

SITES = Sites(secure=True, transport="hivemind")


def welcome(carrier: SiteCarrier, address: str) -> None:
    """Have a node answer as a site of the run does."""

    async def hello(sender: str, request: HelloRequest) -> HelloReply:
        return HelloReply(protocol=1, run_hash=RUN, site=Site(node=carrier.node, address=address))

    carrier.serve(HELLO, hello)
    carrier.serve(LEAVE, ack)
    ProbeServer(carrier, RUN)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hivemind_carrier, "RENEWAL", 0.1)


@pytest.fixture
async def alice(tmp_path: Path) -> AsyncGenerator[tuple[SiteCarrier, str]]:
    """A node that others reach."""
    async with SITES.listening(ALICE, folder=tmp_path) as (carrier, address):
        welcome(carrier, address)
        yield carrier, address


async def behind_a_router(carrier: SiteCarrier, relay: str) -> str:
    """Have a node believe that it listens where nobody listens; returns the address that it tells."""

    def choose(peers: list[str], advertise: str | None, listen: str) -> Choice:
        return replace(choose_address(peers, advertise, listen), address="127.0.0.1:1")

    welcome(carrier, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hivemind_carrier, "choose_address", choose)
        patch.setattr(hivemind_host, "listening", lambda host, port: ASKING)
        choice = await carrier.listen("127.0.0.1:0", None, [relay])
    assert f"through 127.0.0.1:{port_of(relay)}: a site has no way to" in choice.why
    assert "connection refused" in choice.why
    return choice.address


async def test_a_site_that_is_reached_needs_no_relay(alice: tuple[SiteCarrier, str]) -> None:
    bob = SITES.carrier(BOB)
    welcome(bob, "")
    choice = await bob.listen("127.0.0.1:0", None, [alice[1], SITES.nowhere()])
    assert not parse_routes(choice.address)[0].relay
    assert len(parse_routes(choice.address)) == 1
    await bob.stop()


async def test_two_that_nobody_reaches_meet_at_a_relay(alice: tuple[SiteCarrier, str], tmp_path: Path) -> None:
    relay, at_alice = alice
    bob, carol = SITES.carrier(BOB), SITES.carrier(CAROL)
    at_bob, at_carol = await behind_a_router(bob, at_alice), await behind_a_router(carol, at_alice)
    bob.introduce(carol.node, at_carol)
    carol.introduce(bob.node, at_bob)
    for asker, other in ((bob, carol), (carol, bob)):
        assert await asker.call(other.node, LEAVE, LEAVING, QUICK) == Ack()
    await relay.stop()
    with pytest.raises(PeerLost):
        await bob.call(carol.node, LEAVE, LEAVING, QUICK)
    async with SITES.listening(ALICE, port=port_of(at_alice), folder=tmp_path) as (again, _):
        welcome(again, at_alice)
        async with asyncio.timeout(4 * QUICK):
            while True:
                with suppress(PeerLost):
                    await bob.call(carol.node, LEAVE, LEAVING, QUICK)
                    break
                await asyncio.sleep(0.1)
    await bob.stop()
    await carol.stop()


async def test_a_relay_reaches_those_that_came_to_it(alice: tuple[SiteCarrier, str]) -> None:
    relay, at_alice = alice
    bob = SITES.carrier(BOB)
    relay.introduce(bob.node, at_bob := await behind_a_router(bob, at_alice))
    assert len(parse_routes(at_bob)) == 2
    assert await relay.call(bob.node, LEAVE, LEAVING, QUICK) == Ack()
    await bob.stop()
    with pytest.raises(PeerLost, match="connection refused"):
        await relay.call(bob.node, LEAVE, LEAVING, QUICK)


async def test_a_place_that_is_lost_is_told(alice: tuple[SiteCarrier, str], caplog: pytest.LogCaptureFixture) -> None:
    asker = SITES.carrier(BOB)
    assert isinstance(asker, HivemindCarrier)
    p2p = await asker._host.client()
    route = parse_routes(alice[1])[0]
    assert (await reserve(p2p, route)).data > 0
    places = Places([route])
    caplog.set_level("INFO")
    await places.take(p2p)
    await alice[0].stop()
    with pytest.raises(NoWay, match="connection refused"):
        await reserve(p2p, route)
    for _ in range(2):
        await places.take(p2p)
    told = [record.getMessage() for record in caplog.records if "relay" in record.getMessage()]
    assert told == [f"127.0.0.1:{route.port} does not relay for this site: connection refused: nothing listens there"]
    await asker.stop()
