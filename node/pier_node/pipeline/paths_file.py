"""The latest planned paths as JSON, for people: in the planner's data folder and on the coordinator's page."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pier_node.base import durable
from pier_node.pipeline.planner import drifted
from pier_node.pipeline.planning.plan import Plan, plan_from_dict, plan_to_dict
from pier_node.pipeline.planning.problem import Problem, problem_from_json, problem_to_json
from pier_proto.v1.coordinator_pb2 import Paths

MOST_BYTES = 128 << 10
"""Largest size sent to the coordinator, in bytes. Larger plans are not drawn there."""
EVERY = 10.0
"""Seconds between two messages: random paths change in every step."""


class LatestPaths:
    """Receives paths from the planner.

    Attributes:
        message: the message for the coordinator; None: nothing was planned here. It is a new object whenever it
            changes.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.message: Paths | None = None
        self._file, self._clock = file, clock
        self._told: tuple[Problem, Plan] | None = None
        self._due = 0.0

    def planned(self, round: int, problem: Problem, plan: Plan) -> None:
        """Store the paths of a round, with the currently known times. Raises OSError."""
        write_paths(self._file, round, problem, plan)
        if self._clock() < self._due or not self._is_news(problem, plan):
            return
        self._told, self._due = (problem, plan), self._clock() + EVERY
        content = paths_json(round, _shown(problem, plan), plan)
        if len(content) <= MOST_BYTES:
            self.message = Paths(round=round, content=content)

    def _is_news(self, problem: Problem, plan: Plan) -> bool:
        if self._told is None:
            return True
        before, shown = self._told
        same = plan == shown and [site.name for site in problem.sites] == [site.name for site in before.sites]
        return not same or drifted(before, problem)


def _shown(problem: Problem, plan: Plan) -> Problem:
    """What a drawing shows of a problem: three digits of each time, and only the links that paths use."""
    hops = {hop for path in plan.paths for hop in pairwise((*path, path[0]))}
    used = hops | {(b, a) for a, b in hops}
    transfers = (
        tuple(_short(took) if (a, b) in used else 0 for b, took in enumerate(row))
        for a, row in enumerate(problem.transfer_s)
    )
    sites = (
        replace(it, forward_s=_short(it.forward_s), backward_s=_short(it.backward_s), loss_s=_short(it.loss_s))
        for it in problem.sites
    )
    uplinks = tuple(map(_short, problem.uplink_s))
    return replace(problem, sites=tuple(sites), transfer_s=tuple(transfers), uplink_s=uplinks)


def _short(seconds: float) -> float:
    return float(f"{seconds:.3g}")


PATHS_FILE = "paths.json"


@dataclass(frozen=True)
class Drawn:
    """The problem and the plan of a round; `key` identifies the plan, independent of its times."""

    key: str
    round: int
    problem: Problem
    plan: Plan

    def victim(self) -> tuple[str, int]:
        """The last site of the stage with most sites, preferably not the first stage; and that stage."""
        stages = self.plan.stages
        stage = max(range(len(stages)), key=lambda it: (len(stages[it]), it > 0, it))
        return self.problem.sites[stages[stage][-1]].name, stage


def paths_json(round: int, problem: Problem, plan: Plan) -> bytes:
    """The JSON that `parse_paths` reads."""
    body = {"round": round, "problem": problem_to_json(problem), "plan": plan_to_dict(problem, plan)}
    return json.dumps(body, separators=(",", ":")).encode()


def write_paths(path: Path, round: int, problem: Problem, plan: Plan) -> None:
    """Write the paths for others to read. Raises OSError."""
    durable.replace(path, paths_json(round, problem, plan))


def read_paths(path: Path, names: Mapping[str, str]) -> Drawn:
    """Read the file, with names in place of node ids. Raises PierError, OSError."""
    return parse_paths(path.read_bytes(), names)


def parse_paths(content: bytes, names: Mapping[str, str]) -> Drawn:
    """Parse the content of a file, with names in place of node ids.

    Raises PierError; ValueError, KeyError or TypeError for content of a different form.
    """
    body = json.loads(content)
    problem = problem_from_json(body["problem"])
    sites = tuple(replace(site, name=names.get(site.name, site.name)) for site in problem.sites)
    plan = plan_from_dict(problem, body["plan"])
    key = hashlib.sha256(json.dumps(body["plan"]).encode()).hexdigest()
    return Drawn(key, body["round"], replace(problem, sites=sites), plan)
