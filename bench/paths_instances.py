"""The instances that SkipPipe is measured on: networks, and what others reached (paths_instances.json says who)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pier_node.pipeline.planning.plan import Path as Way
from pier_node.pipeline.planning.plan import Plan, worst_intra
from pier_node.pipeline.planning.problem import Problem, problem_from_json

FILE = Path(__file__).with_name("paths_instances.json")


@dataclass(frozen=True)
class Instance:
    """`problem` has the reference's rules, which allow swaps; `reference` and `known` are as in the file."""

    name: str
    problem: Problem
    reference: dict[str, Any]
    known: dict[str, dict[str, Any]]
    bounds: dict[str, float]

    @property
    def best_s(self) -> float:
        """The shortest makespan known, whatever the assignment."""
        return min(float(form["makespan_s"]) for form in self.known.values())

    @property
    def solver_s(self) -> float:
        """How long the reference took: for the assignment, and for its best paths or until it gave up."""
        taken = self.reference["solver_s"]
        return float(taken["assignment"]) + float(taken["collision_aware"])

    @property
    def in_order(self) -> Problem:
        """Without swaps."""
        return replace(self.problem, rules=replace(self.problem.rules, max_swaps=0))

    @property
    def cap_s(self) -> float:
        """How far apart the sites of a stage are in the reference's assignment."""
        return worst_intra(self.problem.transfer_s, Plan(_tuples(self.reference["partition"]), ()))

    def plan(self, form: dict[str, Any]) -> Plan:
        """A form of the best known as a plan."""
        return Plan(_tuples(form["partition"]), waves(self.problem, _tuples(form["paths"])))


def waves(problem: Problem, paths: tuple[Way, ...]) -> tuple[tuple[Way, ...], ...]:
    """The file's paths, by wave: it has one for a data node, one for each of its places, or one for each visit."""
    places, count = problem.sites[0].memory, problem.waves
    dealt: list[list[Way]] = [[] for _ in range(count)]
    for _, group in groupby(paths, key=lambda path: path[0]):
        own = [*group]
        own *= places // len(own) if len(own) < places else 1
        for number, wave in enumerate(dealt):
            wave += own if len(own) == places else own[number * places : (number + 1) * places]
    return tuple(tuple(wave) for wave in dealt)


@cache
def instances() -> tuple[Instance, ...]:
    """All of them."""
    found = json.loads(FILE.read_text())["instances"]
    keys = "reference", "best_known", "lower_bounds_s"
    return tuple(
        Instance(it["name"], problem_from_json(json.dumps(it["problem"])), *(it[key] for key in keys)) for it in found
    )


def _tuples(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in rows)
