from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from wire.sites import ALICE, BOB, CAROL, LEAVING, OTHER_TOKEN, QUICK, Sites, ack

from pier_node.wire.carrier import LEAVE, PeerLost
from pier_node.wire.libp2p.carrier import HivemindCarrier
from pier_node.wire.links import SiteCarrier
from pier_proto.v1.peer_pb2 import Ack

pytestmark = pytest.mark.processes

SITES = Sites(secure=True, transport="hivemind")


async def knows(carrier: SiteCarrier, node: str, address: str) -> None:
    """Return when a node finds another's address in the DHT."""
    assert isinstance(carrier, HivemindCarrier)
    async with asyncio.timeout(2 * QUICK):
        while True:
            if await carrier._host.discovery.find(node) == address:
                break
            await asyncio.sleep(0.02)


async def test_a_site_that_moved_is_found_through_a_third(sites: Sites, tmp_path: Path) -> None:
    if sites.transport == "grpc":
        pytest.skip("knows peers by what it is told")
    async with sites.listening(ALICE) as (alice, at_alice), sites.listening(BOB, folder=tmp_path) as (bob, at_bob):
        for carrier in (alice, bob):
            carrier.serve(LEAVE, ack)
        async with sites.listening(CAROL) as (carol, _):
            for carrier in (bob, carol):
                carrier.introduce(alice.node, at_alice)
                await carrier.call(alice.node, LEAVE, LEAVING, QUICK)
            carol.introduce(bob.node, sites.nowhere())
            await knows(carol, bob.node, at_bob)
            assert await carol.call(bob.node, LEAVE, LEAVING, 2 * QUICK) == Ack()


async def test_strangers_are_neither_asked_nor_answered() -> None:
    async with (
        SITES.listening(ALICE) as (alice, at_alice),
        SITES.listening(BOB, token=OTHER_TOKEN) as (stranger, at_stranger),
    ):
        assert isinstance(alice, HivemindCarrier)
        assert isinstance(stranger, HivemindCarrier)
        for asker, other, address in ((alice, stranger, at_stranger), (stranger, alice, at_alice)):
            asker.introduce(other.node, address)
            with suppress(PeerLost):
                await asker.call(other.node, LEAVE, LEAVING, QUICK)
        for asker, other in ((alice, stranger), (stranger, alice)):
            await asker._host.discovery._met((await other._host.client()).peer_id.to_bytes())
        assert await alice._host.discovery.find(stranger.node) == ""
        assert await stranger._host.discovery.find(alice.node) == ""
