from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.wire.addresses import ROUTES, Route, are_routes, first_hop, parse_routes

ME, RELAY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "12D3KooWGF3ugU4NqbKjzmao9ve8YPpWtnESKysP54eENKzGgQeS"

hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.text(string.ascii_lowercase, min_size=1, max_size=20).map(lambda name: f"{name}.example.org"),
)
routes = st.builds(Route, hosts, st.integers(1, 65535), st.just(ME), st.sampled_from(["", RELAY]))


@given(st.lists(routes, min_size=1, max_size=ROUTES))
def test_what_is_written_is_read(ways: list[Route]) -> None:
    text = ",".join(map(str, ways))
    assert parse_routes(text) == ways
    assert are_routes(text)


@pytest.mark.parametrize(
    ("text", "route"),
    [
        (f"/ip4/1.2.3.4/tcp/7701/p2p/{ME}", Route("1.2.3.4", 7701, ME)),
        (f"/ip6/fd00::5/tcp/7701/p2p/{ME}", Route("fd00::5", 7701, ME)),
        (f"/dns4/site.example.org/tcp/1/p2p/{ME}", Route("site.example.org", 1, ME)),
        (f"/ip4/1.2.3.4/tcp/7701/p2p/{RELAY}/p2p-circuit/p2p/{ME}", Route("1.2.3.4", 7701, ME, RELAY)),
    ],
)
def test_as_libp2p_writes_it(text: str, route: Route) -> None:
    assert parse_routes(text) == [route]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:7700",
        "/ip4/1.2.3.4/tcp/7701",
        f"/ip4/1.2.3.4/udp/7701/p2p/{ME}",
        f"/ip4/1.2.3.4/tcp/0/p2p/{ME}",
        f"/ip4/1.2.3.4/tcp/65536/p2p/{ME}",
        f"/ip4/1.2.3.256/tcp/1/p2p/{ME}",
        f"/ip6/1.2.3.4/tcp/1/p2p/{ME}",
        f"/ip4/fd00::5/tcp/1/p2p/{ME}",
        f"/dns4/a b/tcp/1/p2p/{ME}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ME[:-1]}0",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ME}\n",
        f"/unix/tmp/x/p2p/{ME}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ME},",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ME},/ip4/1.2.3.4/tcp/1/p2p/{RELAY}",
        ",".join([f"/ip4/1.2.3.4/tcp/1/p2p/{ME}"] * (ROUTES + 1)),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    assert not are_routes(text)
    with pytest.raises(ValueError, match=r"is not /ip4/|more than 4 addresses|addresses of several sites"):
        parse_routes(text)


def test_where_a_connection_is_made_first() -> None:
    assert first_hop("10.0.0.1:7700") == "10.0.0.1:7700"
    assert first_hop(f"/ip6/fd00::5/tcp/7701/p2p/{RELAY}/p2p-circuit/p2p/{ME}") == "[fd00::5]:7701"
