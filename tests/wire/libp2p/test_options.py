from __future__ import annotations

import subprocess

import pytest

from pier_node.wire.libp2p.p2pd import ASKING, _program, listening


def test_p2pd_has_all_these_options() -> None:
    known = subprocess.run([str(_program()), "--help"], capture_output=True, text=True, check=False).stderr
    for option in {*ASKING, *listening("127.0.0.1", 7700)}:
        assert f"  {option.partition('=')[0]}" in known


@pytest.mark.parametrize(
    ("host", "multiaddr"),
    [
        ("0.0.0.0", "/ip4/0.0.0.0/tcp/7700"),
        ("::", "/ip6/::/tcp/7700"),
        ("fd00::5", "/ip6/fd00::5/tcp/7700"),
        ("localhost", "/tcp/7700"),
    ],
)
def test_where_it_listens(host: str, multiaddr: str) -> None:
    (option,) = [option for option in listening(host, 7700) if option.startswith("-hostAddrs=")]
    assert option.endswith(multiaddr)


def test_one_that_only_asks_listens_nowhere() -> None:
    assert "-noListenAddrs=1" in ASKING
    assert not any("hostAddrs" in option for option in ASKING)
