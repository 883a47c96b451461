"""What the rounds of a pipeline took a site and brought, booked as the page, `status` and the metrics add sites up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pier_node.outer.times import Times
from pier_node.pipeline.itinerary import Plan
from pier_node.pipeline.times import Spans
from pier_node.progress import Progress

CLEAR = 4
"""A transfer that takes so many times as long as an empty message says how fast its line is."""


@dataclass
class Account:
    """One site's, in its progress; `each`: tokens of a microbatch."""

    progress: Progress
    node: str
    each: int

    def book(self, seconds: float, spans: Spans | None, plan: Plan | None) -> None:
        """A round has taken so long.

        Args:
            spans: of this site's attempt in it; None: it made none.
            plan: of the attempt, if it counted; otherwise all that was done for it was in vain.
        """
        progress, compute, exchange, lost = self.progress, 0.0, 0.0, 0.0
        if spans and plan is None:
            lost = seconds
        elif spans:
            compute, exchange = spans.computing + spans.step, spans.average
        progress.compute += compute
        progress.waited += seconds - compute
        progress.times = Times(max(seconds - compute - exchange - lost, 0.0), exchange, lost)
        progress.steps = 1 if plan and not plan.message.meet else 0
        if plan and progress.steps:
            tokens = share(plan, self.node, self.each)
            progress.tokens += tokens
            progress.tokens_per_second = tokens / seconds if seconds else 0.0


def share(plan: Plan, node: str, each: int) -> int:
    """A site's part of the tokens of an iteration: the sites on a microbatch's path have equal parts of it."""
    return round(sum(each / plan.length(microbatch) for microbatch in plan.visitors(node)))


def lines(transfers: Mapping[str, float], round_trips: Mapping[str, float], size: int) -> dict[str, float]:
    """Bytes a second to other sites, by node, of the lines whose transfers say it.

    Args:
        transfers: seconds for a tensor of `size` bytes; round_trips: for an empty message and its answer.
    """
    known = {node: seconds for node, seconds in transfers.items() if node in round_trips}
    return {node: size / seconds for node, seconds in known.items() if seconds > CLEAR * round_trips[node]}
