"""Pages of Pier in a browser: headers of every answer, and requests that another page sends through it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


async def add_headers(_request: web.Request, answer: web.StreamResponse) -> None:
    """Every answer has them; nothing but the streams of numbers changes, yet no copy may outlive an upgrade."""
    answer.headers.update(HEADERS)
    answer.headers.setdefault("Cache-Control", "no-cache")


def is_known(host: str, names: Collection[str] = ()) -> bool:
    """Whether a Host is an address, localhost, this machine, or one of `names`: no other page has it by DNS rebinding.

    Args:
        names: in lower case.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
        return name in {"localhost", socket.gethostname().lower(), *names} or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def has_other_origin(request: web.Request) -> bool:
    """Whether a browser sent it for a page that is not ours."""
    origin = request.headers.get("Origin")
    return origin is not None and urlsplit(origin).netloc.lower() != request.host.lower()


def is_from_elsewhere(request: web.Request) -> bool:
    """Whether a browser sent it for another page, under our name or under a name that is not known here."""
    return "Origin" in request.headers and (has_other_origin(request) or not is_known(request.host))
