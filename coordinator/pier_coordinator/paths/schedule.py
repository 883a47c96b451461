"""What happens when, as the simulator says: the tasks of every site, and what travels between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

FORWARD: Final = "forward"
LOSS: Final = "loss"
BACKWARD: Final = "backward"
Kind = Literal["forward", "loss", "backward"]
Way = Literal["forward", "backward"]


@dataclass(frozen=True)
class Task:
    """A site's work on a microbatch, that waits there from its arrival to its start. Seconds of the iteration."""

    site: int
    microbatch: int
    kind: Kind
    arrival_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Transfer:
    """An activation, or on its way back a gradient, between two sites."""

    source: int
    target: int
    microbatch: int
    kind: Way
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """An iteration: microbatches are numbered wave by wave, as the plan's paths."""

    sites: int
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def makespan_s(self) -> float:
        """Until the last backward is done."""
        return max(task.end_s for task in self.tasks)

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Of each site: the part of the iteration in which it computes."""
        busy = [0.0] * self.sites
        for task in self.tasks:
            busy[task.site] += task.end_s - task.start_s
        return tuple(seconds / self.makespan_s for seconds in busy)

    @cached_property
    def waiting_s(self) -> tuple[float, ...]:
        """Of each site: how long microbatches waited there, all together."""
        waited = [0.0] * self.sites
        for task in self.tasks:
            waited[task.site] += task.start_s - task.arrival_s
        return tuple(waited)
