"""The result of planning: which site holds which stage, and every microbatch's path; problems and plans as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pier_node.base.errors import PierError
from pier_node.pipeline.planning.problem import Matrix, Problem

Path = tuple[int, ...]
"""Sites in the order of a microbatch's forward, by index in the problem. The first creates it and computes its loss."""


@dataclass(frozen=True)
class Plan:
    """`stages`: the sites of each stage; `waves`: the paths of each wave's microbatches."""

    stages: tuple[tuple[int, ...], ...]
    waves: tuple[tuple[Path, ...], ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all microbatches, wave by wave."""
        return tuple(path for wave in self.waves for path in wave)

    def stage_of(self) -> dict[int, int]:
        """Site -> the stage that it holds; idle sites are left out."""
        return {site: stage for stage, sites in enumerate(self.stages) for site in sites}


def worst_intra(matrix: Matrix, plan: Plan) -> float:
    """The longest distance between two sites that hold the same stage, in seconds."""
    return max((matrix[a][b] for sites in plan.stages for a in sites for b in sites if a != b), default=0.0)


def sync_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds to average gradients over the replicas of the slowest stage; 0 if syncing is not counted.

    A ring all-reduce over n sites sends 2 (n - 1) / n of the gradients over every link of the ring. The stage's slowest
    link is assumed for all links.
    """
    if not problem.gradient_s:
        return 0.0
    rings = (Plan((sites,), ()) for sites in plan.stages)
    return max(2 * (1 - 1 / len(ring.stages[0])) * worst_intra(problem.gradient_s, ring) for ring in rings)


def problem_from_json(text: str | bytes) -> Problem:
    """Parse a problem. Raises PierError: which key is wrong, and how."""
    try:
        return TypeAdapter(Problem).validate_json(text)
    except ValidationError as error:
        raise _refused(error) from error


def problem_to_json(problem: Problem) -> str:
    """The JSON that `problem_from_json` reads."""
    return json.dumps(asdict(problem), indent=1)


def plan_to_dict(problem: Problem, plan: Plan) -> dict[str, Any]:
    """A plan with the names of its sites."""
    names = [site.name for site in problem.sites]
    return {
        "stages": [[names[site] for site in sites] for sites in plan.stages],
        "waves": [[[names[site] for site in path] for path in wave] for wave in plan.waves],
    }


def plan_from_dict(problem: Problem, body: dict[str, Any]) -> Plan:
    """The plan from such a dict. Raises PierError: it names a site that the problem does not have."""
    number = {site.name: index for index, site in enumerate(problem.sites)}
    try:
        stages = tuple(tuple(number[name] for name in sites) for sites in body["stages"])
        waves = tuple(tuple(tuple(number[name] for name in path) for path in wave) for wave in body["waves"])
    except (KeyError, TypeError) as error:
        raise PierError(f"this is no plan for these sites: {error}", "Plan anew without it.") from error
    return Plan(stages, waves)


def _refused(error: ValidationError) -> PierError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"]) or "the file"
    if first["type"] == "unexpected_keyword_argument":
        known = ", ".join(field.name for field in fields(Problem))
        return PierError(f"the problem has a key that means nothing: {key}", f"There are: {known}.")
    return PierError(f"the problem cannot be read: {key}: {first['msg']}", "docs/paths.md describes every key.")
