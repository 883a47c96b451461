"""The operator's actions on the page: POST /api/actions/..., with a small JSON body."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from pier_coordinator.page.guard import Guard, bad
from pier_coordinator.store.refusals import Refused
from pier_node.wire.bounds import STAGES

MOST_NODES = 4096
LONGEST_EXPIRY = 365 * 86400.0
MOST_USES = 10_000
KINDS = ("replica", "stage")
MOST_DOMAINS = 256
"""Maximum number of domains to score besides those that have an expert."""


class Actions(Protocol):
    """Performs the actions. Nodes are node ids; an empty list of nodes means all. All methods raise Refused."""

    async def pause(self, nodes: list[str]) -> None:
        """Pause sites from their next round boundary on."""

    async def resume(self, nodes: list[str]) -> None:
        """Let sites continue training."""

    async def stop(self, nodes: list[str]) -> None:
        """Let sites leave the run politely and end."""

    async def revoke(self, node: str) -> dict[str, Any]:
        """Revoke a site or an invite; the answer has the "invite" that was revoked, if any, and the "sites" that joined
        with it and stay."""

    async def invite(self, name: str, expires_seconds: float, uses: int) -> dict[str, Any]:
        """Make an invite; the answer has at least "command", which is to be pasted at the site."""

    async def assign(self, node: str, kind: str, stage: int | None) -> None:
        """Give a site another assignment from a round boundary on; `stage` is the number of the stage, if it is one."""

    async def experts(self, plan: str) -> None:
        """Start the plan with this id, which must be in the coordinator's folder."""

    async def experts_told(self) -> dict[str, Any]:
        """The progress of the experts."""

    async def evaluate(self, domains: list[Any], rows: int, patience: float) -> None:
        """Let the sites score the experts, on these domains too; `patience` is in seconds."""

    async def evaluation(self) -> dict[str, Any]:
        """The progress of the evaluation."""


Act = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


def action_routes(actions: Actions, guard: Guard) -> list[web.RouteDef]:
    """The routes POST /api/actions/NAME, one per action."""
    acts: dict[str, Act] = {
        "pause": lambda body: actions.pause(_nodes(body)),
        "resume": lambda body: actions.resume(_nodes(body)),
        "stop": lambda body: actions.stop(_nodes(body)),
        "revoke": lambda body: actions.revoke(_node(body)),
        "invite": lambda body: actions.invite(_name(body), *_limits(body)),
        "assign": lambda body: actions.assign(_node(body), *_kind(body)),
        "experts": lambda body: actions.experts(_plan(body)),
        "experts-told": lambda _body: actions.experts_told(),
        "evaluate": lambda body: actions.evaluate(*_scoring(body)),
        "evaluation": lambda _body: actions.evaluation(),
        "check": _check,
    }
    return [web.post(f"/api/actions/{name}", _handler(act, guard)) for name, act in acts.items()]


async def _check(_body: dict[str, Any]) -> None:
    """Do nothing: the page uses it to check whether the token is right."""


def _handler(act: Act, guard: Guard) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        guard.check(request)
        body = await _body(request)
        try:
            return web.json_response(await act(body) or {"ok": True})
        except Refused as reason:
            return web.json_response({"error": str(reason)}, status=409)

    return handle


async def _body(request: web.Request) -> dict[str, Any]:
    if request.content_type != "application/json":
        raise bad("the body must be JSON, and say so (Content-Type: application/json)")
    try:
        body = json.loads(await request.text())
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not JSON: {type(error).__name__}") from error
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    return body


def _nodes(body: dict[str, Any]) -> list[str]:
    nodes = body.get("nodes")
    if not isinstance(nodes, list) or len(nodes) > MOST_NODES or not all(map(_is_name, nodes)):
        raise bad("nodes: must be a list of node ids; [] means all sites")
    return nodes


def _node(body: dict[str, Any]) -> str:
    node = body.get("node")
    if not _is_name(node):
        raise bad("node: must be a node id")
    return str(node)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 128 and value.isprintable()


def _name(body: dict[str, Any]) -> str:
    name = body.get("name", "")
    if name != "" and (not _is_name(name) or len(name) > 64):
        raise bad("name: must be a text of at most 64 characters")
    return str(name)


def _limits(body: dict[str, Any]) -> tuple[float, int]:
    expires, uses = body.get("expires_seconds", 86400), body.get("uses", 1)
    if isinstance(expires, bool) or not isinstance(expires, int | float) or not 0 < expires <= LONGEST_EXPIRY:
        raise bad("expires_seconds: must be a number above 0, a year at most")
    if isinstance(uses, bool) or not isinstance(uses, int) or not 0 < uses <= MOST_USES:
        raise bad(f"uses: must be a whole number, 1 to {MOST_USES}")
    return float(expires), uses


def _plan(body: dict[str, Any]) -> str:
    plan = body.get("plan")
    if not isinstance(plan, str) or len(plan) != 32:
        raise bad("plan: must be the id of a plan, 32 hex digits")
    return plan


def _scoring(body: dict[str, Any]) -> tuple[list[Any], int, float]:
    domains, rows, patience = body.get("domains", []), body.get("rows", 0), body.get("patience", 600.0)
    if not isinstance(domains, list) or len(domains) > MOST_DOMAINS:
        raise bad(f"domains: must be a list of at most {MOST_DOMAINS}")
    if isinstance(rows, bool) or not isinstance(rows, int) or not 0 <= rows < 1 << 31:
        raise bad("rows: must be a whole number, 0 for all")
    if isinstance(patience, bool) or not isinstance(patience, int | float) or not 1 <= patience <= 1e7:
        raise bad("patience: must be a number of seconds, 1 at least")
    return domains, rows, float(patience)


def _kind(body: dict[str, Any]) -> tuple[str, int | None]:
    kind, stage = body.get("kind"), body.get("stage")
    if kind not in KINDS:
        raise bad(f"kind: must be one of: {', '.join(KINDS)}")
    if kind != "stage":
        return str(kind), None
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < STAGES:
        raise bad("stage: must be the number of a stage")
    return str(kind), stage
