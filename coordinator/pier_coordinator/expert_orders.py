"""What the sites of a plan of experts are told to train, and to whom another order is owed.

Jobs and orders are written one after the other. A coordinator that is killed in between, or whose disk is full, gives
the orders later: who is to get one is known before the jobs change, or seen by the first look after a start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pier_coordinator.coordinator import Coordinator

DECIDED = ("plan", "jobs", "complete")
"""What the jobs decide of an order; the rest of it is news, of which an older one does no harm."""


class ExpertOrders:
    """Those of one plan.

    Args:
        plan: its id.
        wanted: what a site is to be told now.
    """

    def __init__(self, coordinator: Coordinator, plan: str, wanted: Callable[[str], dict[str, Any]]) -> None:
        self._of, self._plan, self._wanted = coordinator, plan, wanted
        self._owed: set[str] | None = None

    async def give(self, nodes: Iterable[str]) -> None:
        """Tell these sites what is theirs now."""
        for node in sorted({*nodes} - {""}):
            if self._of.sites[node].revoked_at is None:
                await self._of.assign({"expert": self._wanted(node)}, [node])
            if self._owed is not None:
                self._owed.discard(node)

    def owe(self, nodes: Iterable[str]) -> None:
        """These are about to get another order."""
        if self._owed is not None:
            self._owed |= {*nodes}

    async def pay(self, involved: Callable[[], Iterable[str]]) -> bool:
        """Give what is owed, at first to those involved whose order is not what it should be; whether any was."""
        if self._owed is None:
            self._owed = {node for node in involved() if self._is_behind(node)}
        late = bool(self._owed)
        await self.give(self._owed)
        return late

    def holders(self) -> set[str]:
        """Nodes whose order is of this plan."""
        return {node for node, order in self._of.orders.items() if _expert(order.assignment).get("plan") == self._plan}

    def _is_behind(self, node: str) -> bool:
        known, wanted = _expert(self._of.orders[node].assignment), self._wanted(node)
        return any(known.get(key) != wanted[key] for key in DECIDED)


def _expert(assignment: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an assignment says of experts; {}: it is of another kind."""
    return dict(assignment.get("expert", {}))
