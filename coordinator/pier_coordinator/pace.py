"""How fast sites train their experts, by what they say of them: the mean of the last stretch of some length."""

from __future__ import annotations

from dataclasses import dataclass

STEPS, SECONDS = 20, 10.0
"""A stretch has so many steps at least, and takes so long: a measurement of fewer is mostly chance."""


@dataclass(frozen=True)
class Mark:
    """Where a stretch began: an expert, its steps, and the seconds of that start of the site in training it."""

    job: int
    step: int
    seconds: float


class Paces:
    """Of all sites, by node."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._speeds: dict[str, float] = {}

    def heard(self, node: str, job: int, step: int, seconds: float, flops: float) -> None:
        """A site says how far it is with an expert; `flops` are those of a step.

        A site that was started again, or paused, begins its seconds anew: what it did meanwhile is not known.
        """
        mark = self._marks.get(node)
        if mark is None or mark.job != job or step < mark.step or seconds < mark.seconds:
            self._marks[node] = Mark(job, step, seconds)
        elif step - mark.step >= STEPS and seconds - mark.seconds >= SECONDS:
            self._speeds[node] = flops * (step - mark.step) / (seconds - mark.seconds)
            self._marks[node] = Mark(job, step, seconds)

    def speed(self, node: str) -> float | None:
        """FLOP/s; None: not measured yet."""
        return self._speeds.get(node)
