"""The checks before an action: where the request comes from, and the operator's token."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from aiohttp import web

from pier_node.base.http import has_other_origin


class Guard:
    """Lets only the operator through.

    Args:
        operator_token: the token that a request must carry.
        hosts: names of the page in browsers; see the node's base/http.py.
    """

    def __init__(self, operator_token: str, hosts: Collection[str]) -> None:
        self._token, self._hosts = operator_token.encode(), hosts

    def check(self, request: web.Request) -> None:
        """Check a request. Raises HTTPForbidden, HTTPUnauthorized."""
        if has_other_origin(request, self._hosts):
            origin = request.headers["Origin"][:100]
            raise _no(
                web.HTTPForbidden,
                f"this request comes from another page, {origin!a}; if that is this page behind a proxy, start the "
                "coordinator with that name: pier-coordinator start --host NAME[:PORT]",
            )
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        right = secrets.compare_digest(token.strip().encode(errors="replace"), self._token)
        if scheme.lower() != "bearer" or not self._token or not right:
            raise _no(web.HTTPUnauthorized, "that is not the operator's token")


def _no(kind: type[web.HTTPForbidden | web.HTTPUnauthorized | web.HTTPBadRequest], problem: str) -> web.HTTPException:
    return kind(text=web.json_response({"error": problem}).text, content_type="application/json")


def bad(problem: str) -> web.HTTPException:
    """The error for an invalid request; `problem` says what is wrong with it."""
    return _no(web.HTTPBadRequest, problem)
