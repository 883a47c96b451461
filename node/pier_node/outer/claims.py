"""Whether to believe a site that says it has committed a later round.

Not while most of those whose votes that took say that they did not vote: a single liar cannot send all the others after
a state that is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pier.v1.peer_pb2 import Pulse
from pier_node.outer.quorum import has_quorum


def is_credible(claim: Pulse, round: int, base: Collection[str], pulses: Iterable[Pulse]) -> bool:
    """Whether the round after `round` may have been decided without our knowledge, as `claim` says.

    A decision needs votes of a majority of the last members, and a vote stays with whoever cast it; who has handed its
    own over does not deny. Pulses may be a beat old, so that a true claim is doubted for a beat at most.

    Args:
        round: the last one committed here.
        base: its members.
        pulses: what all live sites last said of themselves, this one included.
    """
    deniers = {pulse.site.node for pulse in pulses if _denies(pulse, claim, round)}
    return not base or has_quorum(set(base) - deniers, base)


def _denies(pulse: Pulse, claim: Pulse, round: int) -> bool:
    if pulse.round != round or not pulse.HasField("pledge"):
        return False
    return not pulse.pledge or (claim.round == round + 1 and pulse.pledge != claim.digest)
