"""What bench/pipeline.py computes from the sites' events and the planner's paths: pure.

All sites of an iteration have the same clock. The time from the first site's start to the end is cut where the last
site was done with a part of it: so the parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Event = dict[str, Any]
PARTS = ("tasks", "average", "total", "step")


@dataclass(frozen=True)
class Iteration:
    """One that counted; seconds.

    Attributes:
        predicted: by the planner's simulator, for the plan that was executed, with the times as it knew them.
        measured: until the last microbatch was back; the others are what the step adds to that.
        average: of gradients between replicas; `total`: their norm over all stages; `step`: AdamW and the disk.
        commit: the round that decides, and its checkpoint; `between`: until the next iteration begins.
    """

    round: int
    predicted: float
    measured: float
    average: float
    total: float
    step: float
    commit: float
    between: float

    @property
    def whole(self) -> float:
        """Seconds until the next iteration begins."""
        return self.measured + self.average + self.total + self.step + self.commit + self.between

    @property
    def error(self) -> float:
        """Of the prediction, as part of what was measured."""
        return self.predicted / self.measured - 1


def iterations(sites: Sequence[Sequence[Event]], predicted: Mapping[int, float]) -> list[Iteration]:
    """Those that all sites of the plan have told of, and for which there is a prediction; without the last one."""
    by_round: dict[int, list[Event]] = {}
    for events in sites:
        for event in stepped(events):
            by_round.setdefault(event["round"], []).append(event)
    starts = {number: min(it["iteration"]["began"] for it in events) for number, events in by_round.items()}
    known = [number for number in sorted(by_round) if number in predicted and number + 1 in starts]
    return [_iteration(number, predicted[number], by_round[number], starts[number + 1]) for number in known]


def stepped(events: Sequence[Event]) -> list[Event]:
    """Of the rounds whose attempt counted at a site that took part in it."""
    pairs = zip([{"inner_step": 0}, *events], events)
    return [
        it for before, it in pairs if it["inner_step"] > before["inner_step"] and _is_of(it["round"], it["iteration"])
    ]


def _is_of(number: int, spans: Event) -> bool:
    return bool(spans) and spans["round"] == number


def _iteration(number: int, predicted: float, events: Sequence[Event], after: float) -> Iteration:
    at, cuts = min(it["iteration"]["began"] for it in events), list[float]()
    for count in range(1, len(PARTS) + 1):
        end = max(it["iteration"]["began"] + sum(it["iteration"][part] for part in PARTS[:count]) for it in events)
        cuts.append(end - at)
        at = end
    measured, average, total, step = cuts
    committed = max(it["time"] for it in events)
    return Iteration(number, predicted, measured, average, total, step, committed - at, after - committed)


@dataclass(frozen=True)
class Result:
    """A policy on some sites."""

    policy: str
    sites: int
    iterations: list[Iteration]

    def middle(self, name: str) -> float:
        """The median of an attribute."""
        return median(float(getattr(it, name)) for it in self.iterations)

    @property
    def typical_error(self) -> float:
        """The median of the errors' sizes."""
        return median(abs(it.error) for it in self.iterations)

    @property
    def within(self) -> float:
        """The share of iterations whose prediction is within a tenth."""
        return sum(abs(it.error) <= 0.1 for it in self.iterations) / len(self.iterations)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        each = [{**asdict(it), "error": it.error} for it in self.iterations]
        return {**vars(self), "typical_error": self.typical_error, "within": self.within, "iterations": each}
