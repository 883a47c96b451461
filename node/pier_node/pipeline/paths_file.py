"""The paths that were planned last, as JSON: in the planner's data folder, and for the coordinator's page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pier_node import durable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pier_coordinator.paths.plan import Plan
    from pier_coordinator.paths.problem import Problem

PATHS_FILE = "paths.json"
BESIDE_CHART = 26
"""Columns that a chart leaves to the names of sites and their utilisation."""


@dataclass(frozen=True)
class Drawn:
    """A problem and its plan, of a round; `key` names the plan, whatever its times."""

    key: str
    round: int
    problem: Problem
    plan: Plan

    @property
    def title(self) -> str:
        """What the paths are of."""
        return self.problem.title

    def chart(self, width: int) -> RenderableType:
        """The schedule as a Gantt chart."""
        from pier_coordinator.paths.gantt_text import gantt_text
        from pier_coordinator.paths.simulate import simulate

        return gantt_text(self.problem, self.plan, simulate(self.problem, self.plan), width - BESIDE_CHART)

    def victim(self) -> tuple[str, int]:
        """The last site of the stage, after the first if it can be, that has most; and that stage."""
        stages = self.plan.stages
        stage = max(range(len(stages)), key=lambda it: (len(stages[it]), it > 0, it))
        return self.problem.sites[stages[stage][-1]].name, stage


def paths_json(round: int, problem: Problem, plan: Plan) -> bytes:
    """What `parse_paths` reads."""
    from pier_coordinator.paths.form import plan_to_dict, problem_to_json

    body = {"round": round, "problem": problem_to_json(problem), "plan": plan_to_dict(problem, plan)}
    return json.dumps(body).encode()


def write_paths(path: Path, round: int, problem: Problem, plan: Plan) -> None:
    """Leave them for others to read. Raises OSError."""
    durable.replace(path, paths_json(round, problem, plan))


def read_paths(path: Path, names: Mapping[str, str]) -> Drawn:
    """What was written, with names for node ids. Raises PierError, OSError."""
    return parse_paths(path.read_bytes(), names)


def parse_paths(content: bytes, names: Mapping[str, str]) -> Drawn:
    """The same of its bytes.

    Raises PierError, and for what is not of this form at all ValueError, KeyError or TypeError.
    """
    from pier_coordinator.paths.form import plan_from_dict, problem_from_json

    body = json.loads(content)
    problem = problem_from_json(body["problem"])
    sites = tuple(replace(site, name=names.get(site.name, site.name)) for site in problem.sites)
    plan = plan_from_dict(problem, body["plan"])
    key = hashlib.sha256(json.dumps(body["plan"]).encode()).hexdigest()
    return Drawn(key, body["round"], replace(problem, sites=sites), plan)
