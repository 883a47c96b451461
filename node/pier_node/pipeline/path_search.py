"""Searches for better paths beside the iterations: one search at a time, in a separate process, and then a pause.

Compiling and computing therefore never block the planning site. The process reads a problem as JSON from stdin and
writes a plan to stdout; see pipeline/planning/search.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable

from pier_node.base.errors import PierError
from pier_node.base.processes import answer
from pier_node.base.tasks import cancel_and_wait
from pier_node.pipeline.planning.plan import Plan, plan_from_dict, plan_to_dict
from pier_node.pipeline.planning.problem import Problem, problem_from_json, problem_to_json

Search = Callable[[Problem, int, float, Plan, bool], Awaitable[Plan]]
"""(problem, seed, seconds, a valid plan, whether stages stay) -> a better plan."""
REST = 5.0
"""Length of the pause after a search, in multiples of the search's duration.

In the pause, changed times of sites start no new search.
"""
COMPILING = 60.0
"""Seconds beyond those of the search: the first one on a machine is compiled."""
POLITE = 10
"""Niceness of the search, so that running iterations have priority; see nice(2)."""

log = logging.getLogger(__name__)


class Searching:
    """The running search, if any."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._task: asyncio.Task[Plan] | None = None
        self._rested = 0.0

    @property
    def idle(self) -> bool:
        """Whether no search is running and the pause after the last one is over."""
        return self._task is None and asyncio.get_running_loop().time() >= self._rested

    async def begin(self, problem: Problem, seed: int, seconds: float, current: Plan) -> None:
        """Start a search for paths over the same stages, and stop the previous one."""
        await self.close()
        self._task = asyncio.create_task(self._timed(problem, seed, seconds, current))

    async def wait(self, seconds: float) -> None:
        """Return once the search is over, or after that many seconds."""
        if self._task:
            await asyncio.wait({self._task}, timeout=seconds)

    def found(self) -> Plan | None:
        """The plan that a finished search has found; each plan is returned once."""
        if self._task is None or not self._task.done():
            return None
        plan, self._task = self._task.result(), None
        return plan

    async def close(self) -> None:
        """Stop the running search."""
        if self._task:
            await cancel_and_wait(self._task)
        self._task = None

    async def _timed(self, problem: Problem, seed: int, seconds: float, current: Plan) -> Plan:
        now = asyncio.get_running_loop().time
        began = now()
        plan = await self._search(problem, seed, seconds, current, True)
        self._rested = now() + REST * (now() - began)
        return plan


async def search_apart(problem: Problem, seed: int, seconds: float, current: Plan, stages_stay: bool) -> Plan:
    """The best plan found in that many seconds; `current`, which is valid, if the search fails."""
    words = {
        "problem": problem_to_json(problem),
        "plan": plan_to_dict(problem, current),
        "seed": seed,
        "seconds": seconds,
        "stay": stages_stay,
    }
    try:
        found = await answer(__name__, stdin=json.dumps(words).encode(), within=seconds + COMPILING)
        if found.code:
            raise PierError(found.errors[-500:])
        return plan_from_dict(problem, json.loads(found.output))
    except TimeoutError:  # before OSError, its base class
        log.warning("the search for paths took more than %.0f s: going on without it", seconds + COMPILING)
    except (OSError, ValueError, PierError) as error:
        log.warning("the search for paths failed: %s", error)
    return current


def main() -> None:
    """Read the problem from stdin, search, and write the plan to stdout."""
    from pier_node.pipeline.planning.search import search  # with numba, which the daemon does without

    os.nice(POLITE)
    words = json.load(sys.stdin)
    problem = problem_from_json(words["problem"])
    current, stay = plan_from_dict(problem, words["plan"]), bool(words["stay"])
    seconds = words["seconds"]  # sites wait for the plan that long
    found = search(problem, words["seed"], seconds, current if stay else None, deadline=seconds)
    print(json.dumps(plan_to_dict(problem, found.plan)))


if __name__ == "__main__":
    main()
