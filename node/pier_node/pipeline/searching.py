"""A search for better paths while iterations go on with those there are: nobody waits for it.

One at a time, of what the planner asked for last; after one there is a rest, since it takes a core of the site that
plans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pier_coordinator.paths.plan import Plan
    from pier_coordinator.paths.problem import Problem

Search = Callable[["Problem", int, float, "Plan", bool], Awaitable["Plan"]]
"""(problem, seed, seconds, a plan that is allowed, whether stages stay) -> a better one."""
REST = 5.0
"""Times as long as a search took, other times of sites are no reason for the next one."""


class Searching:
    """The search under way, if any."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._task: asyncio.Task[Plan] | None = None
        self._rested = 0.0

    @property
    def idle(self) -> bool:
        """None is under way, and the last one is some time ago."""
        return self._task is None and asyncio.get_running_loop().time() >= self._rested

    async def begin(self, problem: Problem, seed: int, seconds: float, current: Plan) -> None:
        """Search for paths over the same stages, and no more for what was asked before."""
        await self.close()
        self._task = asyncio.create_task(self._timed(problem, seed, seconds, current))

    async def wait(self, seconds: float) -> None:
        """Return once the search is over, or after some seconds."""
        if self._task:
            await asyncio.wait({self._task}, timeout=seconds)

    def found(self) -> Plan | None:
        """What a search that is over has found; a plan is given once."""
        if self._task is None or not self._task.done():
            return None
        plan, self._task = self._task.result(), None
        return plan

    async def close(self) -> None:
        """End the search under way."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def _timed(self, problem: Problem, seed: int, seconds: float, current: Plan) -> Plan:
        now = asyncio.get_running_loop().time
        began = now()
        plan = await self._search(problem, seed, seconds, current, True)
        self._rested = now() + REST * (now() - began)
        return plan
