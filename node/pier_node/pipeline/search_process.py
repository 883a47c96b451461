"""Runs the search for paths in a separate process, so that compiling and computing never block the planning site.

The process reads a problem as JSON from stdin and writes a plan to stdout; see pipeline/planning/search.py.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from pier_node.base.errors import PierError
from pier_node.base.processes import answer

if TYPE_CHECKING:
    from pier_node.pipeline.planning.plan import Plan
    from pier_node.pipeline.planning.problem import Problem

COMPILING = 60.0
"""Seconds beyond those of the search: the first one on a machine is compiled."""
POLITE = 10
"""Niceness of the search, so that running iterations have priority; see nice(2)."""

log = logging.getLogger(__name__)


async def search_apart(problem: Problem, seed: int, seconds: float, current: Plan, stages_stay: bool) -> Plan:
    """The best plan found in that many seconds; `current`, which is valid, if the search fails."""
    from pier_node.pipeline.planning.plan import plan_from_dict, plan_to_dict, problem_to_json

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
    from pier_node.pipeline.planning.plan import plan_from_dict, plan_to_dict, problem_from_json
    from pier_node.pipeline.planning.search import search

    os.nice(POLITE)
    words = json.load(sys.stdin)
    problem = problem_from_json(words["problem"])
    current, stay = plan_from_dict(problem, words["plan"]), bool(words["stay"])
    found = search(problem, words["seed"], words["seconds"], current if stay else None, stages_stay=stay)
    print(json.dumps(plan_to_dict(problem, found.plan)))


if __name__ == "__main__":
    main()
