"""Addresses of a site on libp2p: multiaddrs of its own, or of a relay that can reach it.

Only the forms that Pier's sites tell each other are supported: TCP, the libp2p peer that answers, and at most one relay
(https://multiformats.io/multiaddr). Several addresses of one site are written in one text, separated by commas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pier_node.base.address import format_address, is_address

ROUTES = 4
"""Most addresses of one site."""

_PEER = r"[1-9A-HJ-NP-Za-km-z]{32,64}"
_ROUTE = re.compile(
    rf"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/,]{{1,253}})/tcp/(?P<port>[0-9]{{1,5}})"
    rf"(?:/p2p/(?P<relay>{_PEER})/p2p-circuit)?/p2p/(?P<peer>{_PEER})"
)


@dataclass(frozen=True)
class Route:
    """One way to a peer: a TCP connection to a host and, if that host is a relay, on through it.

    Attributes:
        peer: libp2p peer id of the site.
        relay: peer id of the relay; "" if the site is reached directly.
    """

    host: str
    port: int
    peer: str
    relay: str = ""

    def __str__(self) -> str:
        kind = "ip6" if ":" in self.host else "ip4" if self.host.replace(".", "").isdecimal() else "dns"
        circuit = f"/p2p/{self.relay}/p2p-circuit" if self.relay else ""
        return f"/{kind}/{self.host}/tcp/{self.port}{circuit}/p2p/{self.peer}"


def parse_routes(text: str) -> list[Route]:
    """The ways to one site. Raises ValueError if the text is not that."""
    routes = [_route(part) for part in text.split(",")]
    if len(routes) > ROUTES:
        raise ValueError(f"more than {ROUTES} addresses of one site")
    if len({route.peer for route in routes}) != 1:
        raise ValueError("addresses of several sites, written as those of one")
    return routes


def are_routes(text: str) -> bool:
    """Whether a text says how to reach a site on libp2p."""
    try:
        parse_routes(text)
    except ValueError:
        return False
    return True


def first_hop(address: str) -> str:
    """HOST:PORT of the first connection on the way to an address, in whichever form the address is."""
    if not are_routes(address):
        return address
    route = parse_routes(address)[0]
    return format_address(route.host, route.port)


def _route(text: str) -> Route:
    match = _ROUTE.fullmatch(text)
    route = match and Route(match["host"], int(match["port"]), match["peer"], match["relay"] or "")
    if not route or not is_address(format_address(route.host, route.port)) or (":" in route.host) != ("/ip6/" in text):
        raise ValueError(f"{text[:80]!a} is not /ip4/ADDRESS/tcp/PORT/p2p/PEER, nor with ip6 or dns")
    return route
