from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base.address import DEFAULT_PORT, format_address, is_address, parse_address
from pier_node.base.errors import PierError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("site.example.org:7800", ("site.example.org", 7800)),
        ("site.example.org", ("site.example.org", DEFAULT_PORT)),
        ("node_1", ("node_1", DEFAULT_PORT)),
        ("10.0.0.5:1", ("10.0.0.5", 1)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:7800", ("::1", 7800)),
        ("[fe80::1%eth0]:7800", ("fe80::1%eth0", 7800)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("fd00::5", ("fd00::5", DEFAULT_PORT)),
    ],
)
def test_addresses_are_understood(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


def test_the_port_left_out_can_be_another() -> None:
    assert parse_address("site", 9) == ("site", 9)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":7700", "site:", "site:x", "site:65536", "site:-1", "site:1/x", "site:1\n", "-site:1", "a" * 64 + ":1"),
        *("a b:1", "http://site:1", "10.0.0.256:1", "1.2.3:1", "[10.0.0.1]:1", "[::1", "::1]:7", "[::1]7700", "[]:1"),
    ],
)
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(PierError, match="is not HOST:PORT") as error:
        parse_address(text)
    assert "192.168.1.5:7700" in error.value.remedy


hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z]", fullmatch=True),
)


@given(hosts, st.integers(1, 65535))
def test_what_is_formatted_is_understood(host: str, port: int) -> None:
    text = format_address(host, port)
    assert parse_address(text) == (host, port)
    assert is_address(text)
    assert text.startswith("[") == (":" in host)


@given(st.text(max_size=30))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except PierError:
        assert not is_address(text)
        return
    assert 0 <= port <= 65535
    assert host
    if ":" in host:
        ipaddress.IPv6Address(host)


@pytest.mark.parametrize(
    "text", ["site", "10.0.0.5", "site:0", "::1", "[::1]", "[site]:1", "site:07700", "", "site:1 "]
)
def test_only_a_full_address_is_one(text: str) -> None:
    assert not is_address(text)
