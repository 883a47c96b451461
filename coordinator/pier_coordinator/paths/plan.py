"""What is planned in the end: which site holds which stage, and the path of every microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from pier_coordinator.paths.problem import Matrix, Problem

Path = tuple[int, ...]
"""Sites in the order of a microbatch's forward, by index in the problem; the first creates it and has its loss."""


@dataclass(frozen=True)
class Plan:
    """`stages`: the sites of each stage; `waves`: the paths of each wave's microbatches."""

    stages: tuple[tuple[int, ...], ...]
    waves: tuple[tuple[Path, ...], ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of all microbatches, wave by wave."""
        return tuple(path for wave in self.waves for path in wave)

    def stage_of(self) -> dict[int, int]:
        """Site -> the stage that it holds; idle ones are left out."""
        return {site: stage for stage, sites in enumerate(self.stages) for site in sites}


def worst_intra(matrix: Matrix, plan: Plan) -> float:
    """The longest way between two sites that hold the same stage, seconds."""
    return max((matrix[a][b] for sites in plan.stages for a in sites for b in sites if a != b), default=0.0)


def sync_seconds(problem: Problem, plan: Plan) -> float:
    """How long the replicas of a stage take to average its gradients, for the slowest stage; 0 if that is not counted.

    A ring all-reduce over n sites sends 2 (n - 1) / n of the gradients over every link of the ring; the slowest link of
    the stage is taken for all of them.
    """
    if not problem.gradient_s:
        return 0.0
    rings = (Plan((sites,), ()) for sites in plan.stages)
    return max(2 * (1 - 1 / len(ring.stages[0])) * worst_intra(problem.gradient_s, ring) for ring in rings)
