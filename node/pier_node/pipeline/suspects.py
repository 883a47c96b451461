"""Sites that attempts failed by, as far as the planner has heard.

Such a site is left out of the next plan, so that the iteration is done. If it happens again as soon as it is planned
in, as with two sites whose link is cut while all others see both, it is left out of twice as many, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST = 8
"""Rounds that a site is left out at most."""


class Suspects:
    """Whom to leave out of the plan of a round."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[int, int]] = {}

    def add(self, node: str, round: int) -> None:
        """The attempt before this round's failed by a site."""
        times = min(2 * self._out[node][0], MOST) if node in self._out else 1
        self._out[node] = times, round + times

    def of(self, round: int) -> set[str]:
        """Those to leave out."""
        return {node for node, (_, until) in self._out.items() if round < until}

    def clear(self, nodes: Iterable[str]) -> None:
        """These took part in an attempt that counted, or there is no plan without them."""
        for node in [*nodes]:
            self._out.pop(node, None)
