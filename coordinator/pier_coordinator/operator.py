"""What the operator can do, as the page and the command line ask for it."""

from __future__ import annotations

from typing import Any

from pier_coordinator.coordinator import Coordinator
from pier_coordinator.home import Home
from pier_coordinator.store.rows import InviteRow
from pier_node.invite import Invite


class Operator:
    """Acts on a coordinator. All methods raise Refused.

    Args:
        address: HOST:PORT at which sites reach the coordinator.
    """

    def __init__(self, coordinator: Coordinator, home: Home, address: str) -> None:
        self._coordinator, self._home, self._address = coordinator, home, address

    async def pause(self, nodes: list[str]) -> None:
        """Have sites, or all, train no further from their next round boundary on."""
        await self._coordinator.pause(nodes or None)

    async def resume(self, nodes: list[str]) -> None:
        """Have sites, or all, train on."""
        await self._coordinator.resume(nodes or None)

    async def stop(self, nodes: list[str]) -> None:
        """Have sites, or all, leave the run."""
        await self._coordinator.stop(nodes or None)

    async def assign(self, node: str, kind: str) -> None:
        """Give a site something else to do."""
        await self._coordinator.assign({kind: {}}, [node])

    async def revoke(self, node: str) -> dict[str, Any]:
        """Put a site out of the run, or take an invite back; tells which, and which sites came with the invite."""
        if node not in {invite.id for invite in self._coordinator.store.invites()}:
            return {"site": (await self._coordinator.revoke(node)).name}
        await self._coordinator.revoke_invite(node)
        came = (site for site in self._coordinator.sites.values() if site.invite == node)
        return {"invite": node, "sites": [site.name for site in came if site.revoked_at is None]}

    async def invite(self, name: str, expires_seconds: float, uses: int) -> dict[str, Any]:
        """Make an invite, and the command that uses it."""
        invite, now = Invite.new(self._home.identity.key.public_key()), self._coordinator.wall()
        row = InviteRow(invite.id, name or None, now + expires_seconds, uses, invite.certificate, now)
        await self._coordinator.invite(row)
        named = f" --name {name}" if name else ""
        command = f"pier-node start --coordinator {self._address} --token {invite}{named}"
        return {"id": invite.id, "token": str(invite), "command": command, "expires": row.expires, "uses": uses}
