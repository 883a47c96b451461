"""The paths that this site has planned last, for people to see: in its data folder, and for the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pier.v1.coordinator_pb2 import Paths
from pier_node.pipeline.estimates import drifted
from pier_node.pipeline.paths_file import paths_json, write_paths

if TYPE_CHECKING:
    from pier_coordinator.paths.plan import Plan
    from pier_coordinator.paths.problem import Problem

MOST_BYTES = 128 << 10
"""Of what the coordinator is told: some sixty sites. Paths of more are not drawn there."""
EVERY = 10.0
"""Seconds between two tellings: random paths are others in every step."""


class LatestPaths:
    """Told of paths by the planner.

    Attributes:
        message: what to tell the coordinator; None: nothing was planned here. Another object whenever it is news.

    Args:
        file: where they are left.
        clock: seconds that never go backward.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.message: Paths | None = None
        self._file, self._clock = file, clock
        self._told: tuple[Problem, Plan] | None = None
        self._due = 0.0

    def planned(self, round: int, problem: Problem, plan: Plan) -> None:
        """A round has these paths, with the times as they are known now. Raises OSError."""
        write_paths(self._file, round, problem, plan)
        if self._clock() < self._due or not self._is_news(problem, plan):
            return
        self._told, self._due = (problem, plan), self._clock() + EVERY
        content = paths_json(round, problem, plan)
        if len(content) <= MOST_BYTES:
            self.message = Paths(round=round, content=content)

    def _is_news(self, problem: Problem, plan: Plan) -> bool:
        if self._told is None:
            return True
        before, shown = self._told
        same = plan == shown and [site.name for site in problem.sites] == [site.name for site in before.sites]
        return not same or drifted(before, problem)
