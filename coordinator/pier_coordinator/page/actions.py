"""The operator's actions: POST /api/actions/..., with a small JSON body, for the page and the command line."""

from __future__ import annotations

import json
import shlex
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from pier_coordinator.identity.home import PLAN_FILE, SCORES, Home
from pier_coordinator.page.access import Access, refusal
from pier_coordinator.runs.coordinator import Coordinator
from pier_coordinator.store.experts import AcceptedPlan
from pier_coordinator.store.sites import Activity, InviteRow, Refused
from pier_node.base.toml import first_problem
from pier_node.base.units import several
from pier_node.experts.config import MOST_DOMAINS, DomainSection
from pier_node.experts.sheet import ScoredDomain
from pier_node.identity.invite import Invite
from pier_node.wire.bounds import STAGES

MOST_NODES = 4096
LONGEST_EXPIRY = 365 * 86400.0
MOST_USES = 10_000
KINDS = ("replica", "stage")
Act = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


class Operator:
    """Performs the operator's actions on a coordinator, which sites reach at `address`. All methods raise Refused."""

    def __init__(self, coordinator: Coordinator, home: Home, address: str) -> None:
        self._coordinator, self._home, self._address = coordinator, home, address

    async def order(self, activity: Activity, nodes: list[str]) -> None:
        """Pause sites from their next round boundary on, let them train, or let them leave the run; []: all sites."""
        await self._coordinator.order(activity, nodes or None)

    async def assign(self, node: str, kind: str, stage: int | None) -> None:
        """Give a site another assignment; a stage only if it holds no other stage."""
        if stage is not None:
            self._may_hold(node, stage)
        await self._coordinator.assign({kind: {} if stage is None else {"number": stage}}, [node])

    def _may_hold(self, node: str, stage: int) -> None:
        stages = self._coordinator.config.pipeline.stages
        if stage >= stages:
            raise Refused(f"this run has {several(stages, 'stage')}, numbered from 0: there is no stage {stage}")
        held = self._coordinator.stage_of(node)
        if held not in (None, stage):
            raise Refused(f"{node} holds stage {held}: to give it another, start it with a new data folder")

    async def experts(self, plan: str) -> None:
        """Start the plan with this id, which must be in the coordinator's folder."""
        try:
            found = AcceptedPlan.model_validate_json((self._home.folder / PLAN_FILE).read_bytes())
        except (OSError, ValueError) as error:
            raise Refused(f"{PLAN_FILE} in the folder of the run is no plan: {error}") from error
        if found.id != plan:
            raise Refused(f"{PLAN_FILE} in the folder of the run is another plan: plan again")
        await self._coordinator.experts.accept(found)

    async def experts_told(self) -> dict[str, Any]:
        """The progress of the experts."""
        return self._coordinator.experts.told()

    async def evaluate(self, domains: list[Any], rows: int, patience: float) -> None:
        """Let the sites score the experts on every domain of the plan and on extra ones (fields of [[domains]])."""
        try:
            extra = [ScoredDomain(section=DomainSection.model_validate(domain)) for domain in domains]
        except ValidationError as error:
            raise Refused(f"a domain to score: {first_problem(error)}") from error
        await self._coordinator.experts.current().evaluate(extra, rows, patience, self._home.folder / SCORES)

    async def evaluation(self) -> dict[str, Any]:
        """The progress of the evaluation."""
        return self._coordinator.experts.scoring_told()

    async def revoke(self, node: str) -> dict[str, Any]:
        """Revoke a site or an invite.

        Returns:
            "site": the name of the site, if it was one. "invite": the invite that was revoked, "" if none. "sites": the
            names of the sites that joined with the same invite and stay.
        """
        coordinator, now = self._coordinator, self._coordinator.wall()
        invites = {invite.id: invite for invite in coordinator.store.invites()}
        if node in invites:
            await coordinator.revoke_invite(node)
            return {"invite": node, "sites": self._came_with(node)}
        site = await coordinator.revoke(node)
        used = invites.get(site.invite)
        ended = used is not None and not used.closed(now)
        return {"site": site.name, "invite": site.invite if ended else "", "sites": self._came_with(site.invite)}

    def _came_with(self, invite: str) -> list[str]:
        sites = self._coordinator.sites.values()
        return [site.name for site in sites if site.invite == invite and site.revoked_at is None]

    async def invite(self, name: str, expires_seconds: float, uses: int) -> dict[str, Any]:
        """Make an invite, and the command that asks for it: all users of a machine can read what is typed there."""
        invite, now = Invite.new(self._home.identity.key.public_key()), self._coordinator.wall()
        row = InviteRow(invite.id, name or None, now + expires_seconds, uses, invite.certificate, now)
        await self._coordinator.invite(row)
        named = f" --name {shlex.quote(name)}" if name else ""
        command = f"pier-node start --coordinator {self._address}{named}"
        return {"id": invite.id, "token": str(invite), "command": command, "expires": row.expires, "uses": uses}


def action_routes(operator: Operator, access: Access) -> list[web.RouteDef]:
    """The routes POST /api/actions/NAME, one per action."""
    acts: dict[str, Act] = {
        "pause": lambda body: operator.order("pause", _nodes(body)),
        "resume": lambda body: operator.order("train", _nodes(body)),
        "stop": lambda body: operator.order("stop", _nodes(body)),
        "revoke": lambda body: operator.revoke(_node(body)),
        "invite": lambda body: operator.invite(_name(body), *_limits(body)),
        "assign": lambda body: operator.assign(_node(body), *_kind(body)),
        "experts": lambda body: operator.experts(_plan(body)),
        "experts-told": lambda _body: operator.experts_told(),
        "evaluate": lambda body: operator.evaluate(*_scoring(body)),
        "evaluation": lambda _body: operator.evaluation(),
        "check": _check,
    }
    return [web.post(f"/api/actions/{name}", _handler(act, access)) for name, act in acts.items()]


async def _check(_body: dict[str, Any]) -> None:
    """Do nothing: the page uses it to check whether the token is right."""


def _handler(act: Act, access: Access) -> Callable[[web.Request], Awaitable[web.Response]]:
    """One action of the operator; the body is a small JSON object."""

    async def handle(request: web.Request) -> web.Response:
        access.check_action(request)
        body = await _body(request)
        try:
            return web.json_response(await act(body) or {"ok": True})
        except Refused as reason:
            return web.json_response({"error": str(reason)}, status=409)
        except sqlite3.Error as error:  # the disk may have room again later
            return web.json_response({"error": f"nothing can be stored: {error}"}, status=503)

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


def bad(problem: str) -> web.HTTPException:
    """The error for an invalid request; `problem` says what is wrong with it."""
    return refusal(web.HTTPBadRequest, problem)
