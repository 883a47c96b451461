"""A contribution on its way into a round, while workers wait for its result or, with overlap, train on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pier_node.outer.schedule import RoundPlan
from pier_node.outer.state import OuterState


@dataclass(frozen=True)
class Flight:
    """One of them.

    Attributes:
        before: the state that it was made from.
        work: ends when the round is decided here, with this site in it or not.
    """

    plan: RoundPlan
    before: OuterState
    work: asyncio.Task[bool]
