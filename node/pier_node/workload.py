"""How many inner steps a site does before a round: all of them, fewer at a slow site, what is left at a late one.

Sites of unequal speed arrive together when each does steps in proportion to its speed; the mean is weighted by tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from pier.v1.peer_pb2 import Pulse
from pier_node.config import OuterSection
from pier_node.outer.schedule import Kind, RoundPlan
from pier_node.progress import Progress

ALIKE = 0.85
"""Sites that have this part of the fastest one's speed do all steps: less is noise."""
LEAST = 1 / 8
"""The part of the steps that even the slowest site does: a site that learns nothing costs more than it brings."""


def steps_worth_doing(
    plan: RoundPlan, outer: OuterSection, progress: Progress, others: Collection[Pulse], late: bool
) -> int:
    """Inner steps to do before the round of `plan`.

    Args:
        progress: of this site. Steps that it did already were offered to a round which is not decided: what that round
            takes of ours must be all that we have.
        others: the pulses of the other participants.
        late: this site has just caught up, and does as many steps as the furthest of the others has left.
    """
    if plan.kind in (Kind.SOLO, Kind.SYNC):
        return plan.steps
    done = progress.inner_step - plan.first_step
    if late:
        done = max(done, *(pulse.inner_step - plan.first_step for pulse in others), 0)
    share = pace(progress.tokens_per_second, others) if outer.adaptive_steps else 1.0
    return min(max(plan.steps - done, 0), max(int(share * plan.steps), 1))  # rather early than late


def pace(speed: float, others: Collection[Pulse]) -> float:
    """This site's speed as a part of the fastest one's, from LEAST to 1; 1 as long as it is not known.

    Args:
        speed: of this site, tokens a second.
    """
    fastest = max((pulse.tokens_per_second for pulse in others), default=0.0)
    if not speed or not fastest or speed >= ALIKE * fastest:
        return 1.0
    return max(speed / fastest, LEAST)
