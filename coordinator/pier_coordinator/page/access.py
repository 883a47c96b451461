"""Who may look at the page, and who may act on it.

Actions need the operator's token. Looking needs nothing, or a token: the viewer's or the operator's. Programs send a
token as `Authorization: Bearer TOKEN`. A browser cannot send that with pictures and streams of events: POST /api/login
gives it a cookie for the viewer's token. The cookie allows looking only: a page that forges requests gains nothing.

The public page has no actions at all, and leaves out addresses, invites and what sites have logged.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from pier_node.base.http import has_other_origin

COOKIE = "pier-viewer"
COOKIE_SECONDS = 30 * 86400
OPEN = ("/", "/healthz", "/api/login")
"""Paths that need no viewer's token: they tell nothing of the run."""
OPEN_FOLDERS = ("/static/", "/api/actions/")
"""Actions check the operator's token."""


@dataclass(frozen=True)
class Access:
    """Who may act on the page, and who may look at it.

    Attributes:
        operator_token: the token for actions; "": nobody may act.
        hosts: names of the page in browsers; see the node's base/http.py.
        viewer_token: the token for looking; "": everybody may look.
    """

    operator_token: str
    hosts: Collection[str] = ()
    viewer_token: str = ""

    def check_action(self, request: web.Request) -> None:
        """Let only the operator through. Raises HTTPForbidden, HTTPUnauthorized."""
        self._check_origin(request)
        if not _is(_bearer(request), self.operator_token):
            raise refusal(web.HTTPUnauthorized, "that is not the operator's token")

    @web.middleware
    async def for_viewers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware that lets only viewers look."""
        if not (request.path in OPEN or request.path.startswith(OPEN_FOLDERS) or self._may_look(request)):
            raise refusal(web.HTTPUnauthorized, "this page needs a token")
        return await handler(request)

    async def login(self, request: web.Request) -> web.Response:
        """POST /api/login with a token: gives the browser its cookie. Raises HTTPForbidden, HTTPUnauthorized."""
        self._check_origin(request)
        if not self._is_viewer(_bearer(request)):
            raise refusal(web.HTTPUnauthorized, "that is neither the viewer's nor the operator's token")
        answer = web.json_response({"ok": True})
        encrypted = request.headers.get("Origin", "").startswith("https://")
        answer.set_cookie(
            COOKIE, self._cookie(), max_age=COOKIE_SECONDS, httponly=True, samesite="Strict", secure=encrypted
        )
        return answer

    def _check_origin(self, request: web.Request) -> None:
        if has_other_origin(request, self.hosts):
            origin = ascii(request.headers["Origin"][:100])[1:-1]
            raise refusal(
                web.HTTPForbidden,
                f"this request comes from another page, {origin}; if that is this page behind a proxy, start the "
                f"coordinator with that name: pier-coordinator start --host {origin.partition('://')[2] or 'NAME'}",
            )

    def _may_look(self, request: web.Request) -> bool:
        if not self.viewer_token:
            return True
        return self._is_viewer(_bearer(request)) or _is(request.cookies.get(COOKIE, ""), self._cookie())

    def _is_viewer(self, token: str) -> bool:
        known = [_is(token, self.viewer_token), _is(token, self.operator_token)]  # both: equally long
        return any(known)

    def _cookie(self) -> str:
        return hmac.new(self.viewer_token.encode(), COOKIE.encode(), hashlib.sha256).hexdigest()


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is(given: str, token: str) -> bool:
    """Whether a token is the right one; "" never is. The time does not depend on how much of it is right."""
    return secrets.compare_digest(given.encode(errors="replace"), token.encode()) and bool(token)


def refusal(
    kind: type[web.HTTPForbidden | web.HTTPUnauthorized | web.HTTPBadRequest], problem: str
) -> web.HTTPException:
    """The error for a request that is not fulfilled; `problem` says why."""
    return kind(text=json.dumps({"error": problem}), content_type="application/json")


PUBLIC_EVENTS = ("run", "site", "order")
"""Kinds of events whose words are the coordinator's own and name no invite."""
LOGGED = "error"
"""Kind of the alerts that repeat what a site has logged."""


def public_site(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of sites without its address and its machine."""
    hidden = ("address", "transport", "version", "workers")
    return {key: value for key, value in row.items() if key not in hidden}


def public_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that everybody may read."""
    return [event for event in events if event["kind"] in PUBLIC_EVENTS]


def public_board(told: Mapping[str, Any]) -> dict[str, Any]:
    """A board, or changes of one, that everybody may read: models may write what stood in private texts."""
    config = told["config"]  # without the section that says where data are
    if config is not None:
        config = {name: section for name, section in config.items() if name.partition(".")[0] != "data"}
    return {
        **told,
        "public": True,
        "config": config,
        "sites": [public_site(row) for row in told["sites"]],
        "events": public_events(told["events"]),
        "samples": [],
        "alerts": [alert for alert in told["alerts"] if alert["kind"] != LOGGED],
    }
