"""What to change when one site does not reach another: from the reasons that the wire gives (wire/grpc_reasons.py)."""

from __future__ import annotations

from pier_node.wire.address import parse_address
from pier_node.wire.multiaddr import first_hop

_SIGNS = (
    ("tokens differ", "Use the token that the run's first site printed; it is also in run.token of its --data folder."),
    ("clocks of the two", "Set the clocks: run NTP at both sites (timedatectl set-ntp true)."),
    ("has expired", "Set the clocks: run NTP at both sites (timedatectl set-ntp true)."),
    ("this is run", "The two sites are in different runs: check --peers, and the --data folder or run.toml at both."),
    ("shows no certificate", "Start every site with --insecure, or none."),
    ("does not speak TLS", "Start every site with --insecure, or none."),
    ("it hung up", "Start every site with --insecure, or none, and all of them with the token of one run."),
    ("speaks protocol", "Install the same version of Pier at every site."),
    ("no such host", "Check how the address is written, or use the IP address."),
    ("cannot be looked up", "Check this machine's name server, or use the IP address."),
    ("two sites advertise", "Give each site an address of its own: start with --advertise HOST:PORT."),
    ("node answers there", "Give each site an address of its own: start with --advertise HOST:PORT."),
)


def to_reach_peer(address: str, reason: str) -> str:
    """When this site does not reach a peer."""
    _, port = parse_address(first_hop(address))
    signs = (
        (
            "connection refused",
            f"Start that site; if it runs, make it listen on that address: --listen 0.0.0.0:{port}.",
        ),
        (
            "no route",
            "Check this machine's network and the address: a private one is reached from its own network only.",
        ),
        ("firewall", f"At that site: {_open(port)}"),
    )
    return _first(reason, signs + _SIGNS, "The log of that site says more.")


def to_be_reached(address: str, reason: str, seen_as: str) -> str:
    """When a peer does not reach this site.

    Args:
        address: of this site, as it tells others.
        seen_as: HOST:PORT that the peer saw this site's connection come from; may be empty.
    """
    host, port = parse_address(first_hop(address))
    signs = (
        (
            "it does not try",
            f"If others reach this site there, start it: they try once it has said so. Else {_other(port)}",
        ),
        ("connection refused", f"Let this site listen on that address: --listen 0.0.0.0:{port}, or {_other(port)}"),
        ("no route", f"Others have no way to {host}: {_other(port)}"),
        ("firewall", f"At this site: {_open(port)}"),
    )
    seen = parse_address(seen_as)[0] if seen_as else host
    hint = f" That peer sees this site as {seen}: try --advertise {seen}:{port}." if seen != host else ""
    return _first(reason, signs + _SIGNS, _open(port)) + hint


def _open(port: int) -> str:
    return f"open TCP port {port} on the firewall and forward it on the router, or {_other(port)}"


def _other(port: int) -> str:
    return f"start with --advertise HOST:{port} and an address that others reach."


def _first(reason: str, signs: tuple[tuple[str, str], ...], otherwise: str) -> str:
    text = next((remedy for sign, remedy in signs if sign in reason), otherwise)
    return text[0].upper() + text[1:]
