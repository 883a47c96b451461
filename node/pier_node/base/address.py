"""Site addresses as people write them: HOST:PORT, where the host is a name, an IPv4 address or an [IPv6] address."""

from __future__ import annotations

import ipaddress
import re

from pier_node.base.errors import PierError

DEFAULT_PORT = 7700
"""Default port of sites."""
COORDINATOR_PORT = 7790
WILDCARDS = ("0.0.0.0", "::")
"""Hosts that mean: all addresses of this machine."""

_WRITTEN = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(?:\.[A-Za-z0-9_-]{1,63})*\.?")


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host, without brackets, and port. A bare IPv6 address is also accepted. Raises PierError."""
    if _is_ipv6(text):
        return text, default_port
    match = _WRITTEN.fullmatch(text)
    host = match and (match["v6"] or match["name"])
    port = int(match["port"]) if match and match["port"] else default_port
    if not match or not host or port > 65535 or not (_is_ipv6(host) if match["v6"] else _is_host(host)):
        raise PierError(
            f"{text!r} is not HOST:PORT", "Write it like site.example.org:7700, 192.168.1.5:7700 or [fd00::5]:7700."
        )
    return host, port


def with_port(text: str, default_port: int = DEFAULT_PORT) -> str:
    """HOST:PORT from user input of the form HOST or HOST:PORT; any other text is returned unchanged."""
    try:
        return format_address(*parse_address(text, default_port))
    except PierError:
        return text


def format_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_url(host: str, port: int) -> str:
    """Where a browser on this machine finds what listens on a host and port."""
    return f"http://{format_address('127.0.0.1' if host in WILDCARDS else host, port)}"


def is_address(text: str) -> bool:
    """Whether a text is exactly what `format_address` returns for some host and a valid port."""
    try:
        host, port = parse_address(text)
    except PierError:
        return False
    return port > 0 and format_address(host, port) == text


def _is_host(text: str) -> bool:
    if text.replace(".", "").isdecimal():  # otherwise 10.0.0.256 would pass for a name
        return _is(ipaddress.IPv4Address, text)
    return _NAME.fullmatch(text) is not None


def _is_ipv6(text: str) -> bool:
    return _is(ipaddress.IPv6Address, text)


def _is(kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
