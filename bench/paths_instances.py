"""The instances that SkipPipe is measured on: networks, and what others reached (paths_instances.json says who)."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pier_node.pipeline.planning.plan import Path as Way
from pier_node.pipeline.planning.plan import Plan, worst_intra
from pier_node.pipeline.planning.problem import Matrix, Problem, Rules, Site, problem_from_json, stage_sizes

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


def hundred(seed: int, regions: bool) -> Problem:
    """100 unequal sites, 200 microbatches through six of eight stages, three of them in flight at a site.

    Args:
        regions: the sites are in ten regions, with lines of 50 to 1,000 Mbit/s up and more down, and an activation has
            8 MB; or else each link takes 0.1 to 4 s either way, and no site is near another one.
    """
    dice, count, stages, length, places = random.Random(seed), 100, 8, 6, 3
    speeds = [0.4 * math.exp(dice.gauss(0, 0.35)) for _ in range(count)]
    sizes = stage_sizes(count, stages, length)
    most = min(places * sizes[0], *(places * size * (stages - 1) // (length - 1) for size in sizes[1:]))
    return Problem(
        sites=tuple(Site(f"s{at}", speed, 1.5 * speed, 0.25 * speed, places) for at, speed in enumerate(speeds)),
        transfer_s=_regional(dice, count) if regions else _anywhere(dice, count),
        stage_sizes=sizes,
        path_length=length,
        microbatches=200,
        waves=-(-200 // most),
        rules=Rules(max_jump=4),
    )


def _anywhere(dice: random.Random, count: int) -> Matrix:
    return tuple(tuple(dice.uniform(0.1, 4) if a != b else 0.0 for b in range(count)) for a in range(count))


def _regional(dice: random.Random, count: int) -> Matrix:
    places = [(dice.uniform(0, 1), dice.uniform(0, 0.6)) for _ in range(10)]
    home = [dice.choice(places) for _ in range(count)]
    up = [10 ** dice.uniform(math.log10(50), 3) for _ in range(count)]
    down = [speed * dice.uniform(1, 5) for speed in up]

    def seconds(a: int, b: int) -> float:
        if a == b:
            return 0.0
        apart = math.dist(home[a], home[b])
        between = 10_000 if home[a] == home[b] else 400 / (0.3 + apart)
        return 0.002 + 0.12 * apart * dice.uniform(0.9, 1.3) + 64 / min(up[a], down[b], between)

    return tuple(tuple(seconds(a, b) for b in range(count)) for a in range(count))


def _tuples(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in rows)
