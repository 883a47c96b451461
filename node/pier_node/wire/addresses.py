"""Addresses of a site: the one that it tells the others, and the multiaddrs of sites on libp2p.

A site tells the address from which the kernel would send to the first of the others. A site with several networks (a
cluster's fabric, a VPN, Docker's bridge) must not guess silently: the choice comes with its reason, and --advertise
overrides it.

On libp2p a site is reached at its own address or through a relay. Only the forms that Pier's sites tell each other are
supported: TCP, the libp2p peer that answers, and at most one relay (https://multiformats.io/multiaddr). Several
addresses of one site are written in one text, separated by commas.
"""

from __future__ import annotations

import errno
import re
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from pier_node.base.address import WILDCARDS, format_address, is_address, parse_address
from pier_node.base.errors import PierError

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


def free_port(host: str, port: int, option: str = "--listen") -> int:
    """The port to listen on, once it is certain that this address can be listened on; 0: the system chooses one.

    Raises:
        PierError: it cannot, and `option` chooses another; the errors of gRPC and aiohttp say less.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        why, remedy = str(error.strerror).partition(" (")[0], f"Choose another address with {option} HOST:PORT."
        if error.errno == errno.EADDRINUSE:
            other = format_address(host, port + 1 if port < 65535 else port - 1)
            remedy = f"Stop {_listener(port)}, or choose another port, for example {option} {other}."
        raise PierError(f"cannot listen on {format_address(host, port)}: {why}", remedy) from error


def _listener(port: int) -> str:
    """The process that listens on a port, for people."""
    with suppress(psutil.Error):
        for it in psutil.net_connections("tcp"):
            if it.status == psutil.CONN_LISTEN and it.laddr and it.laddr.port == port and it.pid:
                return f"process {it.pid} ({psutil.Process(it.pid).name()}), which has it"
    return f"the process that has it (`ss -ltnp 'sport = :{port}'` as root names it)"


_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has (RFC 5737, RFC 3849): the route to them is the default route."""


@dataclass(frozen=True)
class Choice:
    """The address to tell others, the network interface that has it ("" if none here does), and one sentence why."""

    address: str
    interface: str
    why: str


def choose_address(peers: list[str], advertise: str | None, listen: str) -> Choice:
    """Choose the address to advertise. No packet is sent, but host names of peers are looked up.

    Args:
        peers: HOST:PORT of sites to join; may be empty.
        advertise: HOST or HOST:PORT that the user wants; None to choose one.
        listen: HOST:PORT that the node listens on, with the actual port.

    Raises:
        PierError: one of them is not HOST:PORT.
    """
    host, port = parse_address(listen)
    if advertise is not None:
        return _choice(*parse_address(advertise, port), "as --advertise says")
    if host not in WILDCARDS:
        return _choice(host, port, "the only address that --listen allows")
    for peer in peers:
        if source := _source(*parse_address(peer)):
            return _choice(source, port, f"the way to {peer}; --advertise HOST:PORT chooses another")
    for target in _ANYWHERE:
        if source := _source(target, port):
            return _choice(source, port, "the default route; --advertise HOST:PORT chooses another")
    return _choice("127.0.0.1", port, "no network but this machine's own; --advertise HOST:PORT chooses another")


def _choice(host: str, port: int, reason: str) -> Choice:
    address, interface = format_address(host, port), _interface(host)
    return Choice(
        address, interface, f"others reach this site at {address}{f' ({interface})' * bool(interface)}: {reason}"
    )


def _source(host: str, port: int) -> str | None:
    """The source address of packets to a host: connecting a datagram socket looks up the route and sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None  # an unknown host name: greeting that peer will report it
    for family, _, _, _, target in found:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if probe.connect_ex(target) == 0:
                return str(probe.getsockname()[0])
    return None


def _interface(host: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return ""
