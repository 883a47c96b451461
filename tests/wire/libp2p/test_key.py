from __future__ import annotations

from pathlib import Path

from wire.sites import ALICE, Sites

from pier_node.wire.addresses import parse_routes
from pier_node.wire.libp2p.p2pd import KEY_FILE, make_key

SITES = Sites(secure=False, transport="hivemind")


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    key = make_key(tmp_path / KEY_FILE)
    first = key.read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    assert make_key(tmp_path / KEY_FILE).read_bytes() == first
    assert make_key(tmp_path / "another").read_bytes() != first


async def test_it_is_the_name_in_the_address(tmp_path: Path) -> None:
    peers = []
    for folder in (tmp_path, tmp_path, None):
        async with SITES.listening(ALICE, folder=folder) as (_, address):
            peers.append(parse_routes(address)[0].peer)
    assert peers[0] == peers[1] != peers[2]
