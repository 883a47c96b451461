"""Problems and plans as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pier_coordinator.paths.plan import Plan
from pier_coordinator.paths.problem import Problem
from pier_node.errors import PierError


def problem_from_json(text: str | bytes) -> Problem:
    """Raises PierError: which key is wrong, and how."""
    try:
        return TypeAdapter(Problem).validate_json(text)
    except ValidationError as error:
        raise _refused(error) from error


def problem_to_json(problem: Problem) -> str:
    """What `problem_from_json` reads."""
    return json.dumps(asdict(problem), indent=1)


def plan_to_dict(problem: Problem, plan: Plan) -> dict[str, Any]:
    """A plan with the names of its sites."""
    names = [site.name for site in problem.sites]
    return {
        "stages": [[names[site] for site in sites] for sites in plan.stages],
        "waves": [[[names[site] for site in path] for path in wave] for wave in plan.waves],
    }


def plan_from_dict(problem: Problem, body: dict[str, Any]) -> Plan:
    """The plan again. Raises PierError: it names a site that the problem does not have."""
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
