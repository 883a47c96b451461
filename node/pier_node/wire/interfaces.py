"""The address that a site tells the others: the one from which the kernel would send to the first of them.

A site with several networks (a cluster's fabric, a VPN, Docker's bridge) must not guess silently: the choice comes with
its reason, and --advertise overrides it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import psutil

from pier_node.base.address import format_address, parse_address

_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has (RFC 5737, RFC 3849): the route to them is the default route."""
_WILDCARDS = ("0.0.0.0", "::")


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
    if host not in _WILDCARDS:
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
