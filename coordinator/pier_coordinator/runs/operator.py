"""The operator's actions, as the page and the command line request them."""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import ValidationError

from pier_coordinator.identity.home import PLAN_FILE, SCORES, Home
from pier_coordinator.runs.coordinator import Coordinator
from pier_coordinator.store.experts import AcceptedPlan
from pier_coordinator.store.refusals import Refused
from pier_coordinator.store.rows import InviteRow
from pier_node.base.toml import first_problem
from pier_node.base.units import several
from pier_node.experts.config import DomainSection
from pier_node.experts.sheet import ScoredDomain
from pier_node.identity.invite import Invite
from pier_node.identity.node import TOKEN_VARIABLE


class Operator:
    """Performs the operator's actions on a coordinator. All methods raise Refused.

    Args:
        coordinator: the coordinator of the run.
        home: the run's folder.
        address: HOST:PORT at which sites reach the coordinator.
    """

    def __init__(self, coordinator: Coordinator, home: Home, address: str) -> None:
        self._coordinator, self._home, self._address = coordinator, home, address

    async def pause(self, nodes: list[str]) -> None:
        """Pause sites, or all of them, from their next round boundary on."""
        await self._coordinator.pause(nodes or None)

    async def resume(self, nodes: list[str]) -> None:
        """Let sites, or all of them, continue training."""
        await self._coordinator.resume(nodes or None)

    async def stop(self, nodes: list[str]) -> None:
        """Let sites, or all of them, leave the run."""
        await self._coordinator.stop(nodes or None)

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
        await self._coordinator.experts.evaluate(extra, rows, patience, self._home.folder / SCORES)

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
        """Make an invite and the command that uses it."""
        invite, now = Invite.new(self._home.identity.key.public_key()), self._coordinator.wall()
        row = InviteRow(invite.id, name or None, now + expires_seconds, uses, invite.certificate, now)
        await self._coordinator.invite(row)
        named = f" --name {shlex.quote(name)}" if name else ""
        command = f"{TOKEN_VARIABLE}={invite} pier-node start --coordinator {self._address}{named}"
        return {"id": invite.id, "token": str(invite), "command": command, "expires": row.expires, "uses": uses}
