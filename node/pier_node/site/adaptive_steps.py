"""How H adapts to a site's speed: the number of inner steps that it does before a round (`outer.adaptive_steps`).

A site does all inner steps of a round, fewer if it is slow, and only the remaining ones if it is late. Sites of unequal
speed finish together if each does steps in proportion to its speed; the mean of their updates is weighted by tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from pier_node.config.run import OuterSection
from pier_node.outer.schedule import Kind, RoundPlan
from pier_node.rounds.progress import Progress
from pier_proto.v1.peer_pb2 import Pulse

ALIKE = 0.85
"""Sites with at least this fraction of the fastest site's speed do all steps: smaller differences are noise."""
LEAST = 1 / 8
"""Fraction of the steps that even the slowest site does: a site that learns nothing costs more than it contributes."""


def steps_worth_doing(
    plan: RoundPlan, outer: OuterSection, progress: Progress, others: Collection[Pulse], late: bool
) -> int:
    """Number of inner steps to do before the round of `plan`.

    Args:
        progress: this site's progress. Steps of this round that it has done already, before a restart or before a
            result arrived, are not done again.
        others: the pulses of the other participants.
        late: this site has just caught up. It does as many steps as the furthest of the other sites has left.
    """
    if plan.kind in (Kind.SOLO, Kind.SYNC):
        return plan.steps
    done = progress.inner_step - plan.first_step
    if late:
        done = max(done, *(pulse.inner_step - plan.first_step for pulse in others), 0)
    share = pace(progress.tokens_per_second, others) if outer.adaptive_steps else 1.0
    return min(max(plan.steps - done, 0), max(int(share * plan.steps), 1))  # better early than late


def pace(speed: float, others: Collection[Pulse]) -> float:
    """This site's speed as a fraction of the fastest site's, from LEAST to 1; 1 as long as it is not known.

    Args:
        speed: of this site, in tokens per second.
    """
    fastest = max((pulse.tokens_per_second for pulse in others), default=0.0)
    if not speed or not fastest or speed >= ALIKE * fastest:
        return 1.0
    return max(speed / fastest, LEAST)
