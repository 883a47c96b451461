from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from wire.sites import ALICE, BOB, QUICK, Sites, port_of

from pier_node.wire.addresses import Route, parse_routes
from pier_node.wire.libp2p import host as hivemind_dial
from pier_node.wire.libp2p.carrier import HivemindCarrier
from pier_node.wire.libp2p.host import NoWay, _encoded, _ways, dial

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
SITES = Sites(secure=False, transport="hivemind")


def test_routes_in_the_form_of_p2pd() -> None:
    """As go-multiaddr writes them; the peer at the end is told apart."""
    direct: Any = _encoded(Route("1.2.3.4", 7700, PEER), ("1.2.3.4", 7700))
    assert direct.to_bytes() == bytes.fromhex("0401020304061e14")
    through: Any = _encoded(Route("relay.example.org", 7700, PEER, PEER), ("::1", 7700))
    peer = bytes.fromhex("12209e0c4c4d0f6f6b")[:2]
    assert through.to_bytes()[:20] == bytes.fromhex("29" + "00" * 15 + "01" + "061e14")
    assert through.to_bytes()[20:25] == b"\xa5\x03\x22" + peer
    assert through.to_bytes()[-2:] == b"\xa2\x02"
    assert len(through.to_bytes()) == 20 + 3 + 34 + 2


async def test_only_open_ways_are_dialled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ways: Any = await _ways([Route("127.0.0.1", 1, PEER), Route("127.0.0.1", port, PEER)])
    assert [way.to_bytes()[-2:] for way in ways] == [port.to_bytes(2)]


async def test_one_that_hangs_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hivemind_dial, "DIRECT_SECONDS", 0.05)
    opened = hivemind_dial._open

    async def hanging(route: Route) -> tuple[str, int] | str:
        return await asyncio.Event().wait() and "" if route.port == 1 else await opened(route)

    monkeypatch.setattr(hivemind_dial, "_open", hanging)
    with socket.create_server(("127.0.0.1", 0)) as server:
        routes = [Route("127.0.0.1", 1, PEER), Route("127.0.0.1", server.getsockname()[1], PEER, PEER)]
        assert len(await asyncio.wait_for(_ways(routes), QUICK)) == 1


async def test_the_reason_is_the_first_routes() -> None:
    with pytest.raises(NoWay, match="connection refused"):
        await _ways([Route("127.0.0.1", 1, PEER), Route("no-such-host.invalid", 1, PEER)])
    with pytest.raises(NoWay, match="reached only through this node"):
        await _ways([])


async def test_whoever_is_connected_is_not_dialled_again() -> None:
    async with SITES.listening(ALICE) as (alice, at_alice), SITES.listening(BOB) as (bob, _):
        assert isinstance(alice, HivemindCarrier)
        assert isinstance(bob, HivemindCarrier)
        await dial(await bob._host.client(), parse_routes(at_alice))
        back = Route("127.0.0.1", 1, str((await bob._host.client()).peer_id))
        await dial(await alice._host.client(), [back])


async def test_another_peer_at_the_address_is_noticed() -> None:
    async with SITES.listening(ALICE) as (_, at_alice), SITES.listening(BOB) as (bob, _):
        assert isinstance(bob, HivemindCarrier)
        with pytest.raises(NoWay, match="another node answers there"):
            await dial(await bob._host.client(), [Route("127.0.0.1", port_of(at_alice), PEER)])
