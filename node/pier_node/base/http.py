"""Pier's browser pages: the headers of every answer, and the defense against requests from other pages.

Another page's script can make its own name resolve to our address (DNS rebinding), and then read and write here as if
it were ours. It cannot choose the Host header that the browser sends, so we answer only under names that are ours.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

GOODBYE = 2.0
"""Seconds that open pages and answers get to finish when a server stops."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def make_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """What serves an application. It logs no requests, nor what is not HTTP: anyone can send that, in any amount."""
    logging.getLogger("aiohttp.server").addFilter(_is_error_here)
    return web.AppRunner(app, access_log=None, **options)


def _is_error_here(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def add_headers(_request: web.Request, answer: web.StreamResponse) -> None:
    """Add the headers to every answer. Pages change only with an upgrade, but no cached copy may outlive one."""
    answer.headers.update(HEADERS)
    answer.headers.setdefault("Cache-Control", "no-cache")


def is_known(host: str, names: Collection[str] = ()) -> bool:
    """Whether a Host is an address, localhost, this machine, or one of `names`, which DNS rebinding cannot use.

    Args:
        names: NAME or NAME:PORT; the port is ignored.
    """
    try:
        name = _name(host)
        ours = {"localhost", socket.gethostname().lower(), *map(_name, names)}
        return name in ours or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def under_known_names(names: Collection[str] = (), remedy: str = "") -> Middleware:
    """Middleware that refuses every request, reading or writing, whose Host is not known; `names` is as in `is_known`.

    Args:
        remedy: added to the error message, with `{}` in place of the name.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_known(request.host, names):
            host = request.host[:100]
            raise web.HTTPForbidden(text=f"this page is not known as {host!a}{remedy.format(ascii(host)[1:-1])}")
        return await handler(request)

    return check


def has_other_origin(request: web.Request, names: Collection[str] = ()) -> bool:
    """Whether a browser sent the request for a page that is not ours.

    Args:
        names: NAME or NAME:PORT that browsers use for the page besides the request's Host, which a proxy may change.
    """
    origin = request.headers.get("Origin")
    ours = {name.lower() for name in (request.host, *names)}
    return origin is not None and urlsplit(origin).netloc.lower() not in ours


def _name(host: str) -> str:
    """The name in a Host. Raises ValueError."""
    return (urlsplit(f"//{host}").hostname or "").lower()


def is_from_elsewhere(request: web.Request) -> bool:
    """Whether a browser sent the request for another page, under our name or under a name that is not known here."""
    return "Origin" in request.headers and (has_other_origin(request) or not is_known(request.host))


def is_from_here(request: web.Request) -> bool:
    """Whether a program of this machine sent the request, and no proxy passed it on for others."""
    if any(header in request.headers for header in ("Forwarded", "X-Forwarded-For")):
        return False
    try:
        address = ipaddress.ip_address((request.remote or "").removeprefix("::ffff:"))
    except ValueError:
        return False
    return address.is_loopback
