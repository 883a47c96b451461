"""Who may do what: headers of every answer, and the checks before an action."""

from __future__ import annotations

import ipaddress
import secrets
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


class Guard:
    """Lets the operator through, and nobody else."""

    def __init__(self, operator_token: str, hosts: Collection[str]) -> None:
        self._token = operator_token.encode()
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}

    def check(self, request: web.Request) -> None:
        """Raises HTTPForbidden, HTTPUnauthorized."""
        if not self._known(request.host):
            raise _no(web.HTTPForbidden, f"this page is not known as {request.host[:100]!a}; add the name with --host")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
            raise _no(web.HTTPForbidden, "this request comes from another page")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        right = secrets.compare_digest(token.strip().encode(errors="replace"), self._token)
        if scheme.lower() != "bearer" or not self._token or not right:
            raise _no(web.HTTPUnauthorized, "that is not the operator's token")

    def _known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name.lower() in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _no(kind: type[web.HTTPForbidden | web.HTTPUnauthorized | web.HTTPBadRequest], problem: str) -> web.HTTPException:
    return kind(text=web.json_response({"error": problem}).text, content_type="application/json")


def bad(problem: str) -> web.HTTPException:
    """The request is not understood: what is wrong with it."""
    return _no(web.HTTPBadRequest, problem)
