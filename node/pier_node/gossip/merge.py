"""The optional end of a run in pairs: merge all sites' anchors into one model, their plain mean.

The merge is not in the NoLoCo paper (arXiv 2506.10911). It is one atomic round, like Pier's, after the last round of
pairs: either all sites that are there end with the same bits, or their models stay as they are. Its base is the set of
sites that are alive when it begins.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from pier_node.base.shared import SharedVector, Vector
from pier_node.base.tasks import first_of
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.outer.update import Update
from pier_node.rounds.member import Rounds
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Behind
from pier_node.wire.carrier import Carrier

PATIENCE = 300.0
"""Seconds to wait for sites that have not taken the last round yet, and for the merge while nothing is exchanged."""
LOOK = 5.0
MERGE = hashlib.sha256(b"pier merge").digest()
"""Stands for the digest of the state before the merge, because each site has its own state."""

log = logging.getLogger(__name__)


class Merge:
    """One site's part in the merge.

    Args:
        state: this site's state after the last round.
        rounds: created when this site starts, so that sites that come to the merge early are told to wait.

    Attributes:
        members_loss: mean validation loss of the merged models, in nats per token; NaN if it is not known.
    """

    def __init__(self, carrier: Carrier, roster: Roster, state: OuterState, rounds: Rounds) -> None:
        self._roster, self._state, self._rounds, self._node = roster, state, rounds, carrier.node
        carrier.serve_push(rounds.streams.take)
        self.members_loss = math.nan

    async def run(self) -> OuterState | None:
        """The merged state; None (logged) if there is none. Raises Behind if others have merged without us."""
        await self._rounds.begin(replace(self._state, members=(self._node,), ledger={}), MERGE)
        try:
            return await first_of(self._merge(), self._rounds.run())
        except TimeoutError:
            reason = self._rounds.last_error or "nobody came"
            log.warning("the sites' models are not merged: %s; pier-node export writes each of them", reason)
            return None

    async def _members(self) -> Sequence[str]:
        """The sites that are here once all live sites have taken the last round, or after PATIENCE seconds."""
        last = self._state.round
        try:
            async with asyncio.timeout(PATIENCE):
                await self._roster.settled()
                await self._roster.changed.until(lambda: not self._behind(last))
        except TimeoutError:
            log.warning("merging without %s", ", ".join(self._behind(last)))
        return [node for node in self._roster.participants() if node not in self._behind(last)]

    def _behind(self, last: int) -> list[str]:
        return [node for node, pulse in self._roster.pulses().items() if pulse.round < last]

    async def _merge(self) -> OuterState | None:
        members = await self._members()
        if peers := self._roster.ahead(self._state.round):
            raise Behind(peers)
        if len(members) < 2:
            log.info("nobody is here to merge this site's model with")
            return None
        rounds = self._rounds
        await rounds.begin(replace(rounds.state, members=tuple(members)), MERGE)
        state = await first_of(rounds.commit(Update(self._state.anchor, 1), merged), self._until_idle())
        self.members_loss = self._mean_loss(state.members)  # each told its own loss before it came
        return state

    async def _until_idle(self) -> NoReturn:
        """Raise TimeoutError once no attempt has been under way for PATIENCE seconds."""
        idle = 0.0
        while idle <= PATIENCE:
            await asyncio.sleep(LOOK)
            idle = 0.0 if self._rounds.exchanging else idle + LOOK
        raise TimeoutError

    def _mean_loss(self, members: Sequence[str]) -> float:
        pulses = [pulse for node in members if (pulse := self._roster.pulse_of(node))]
        known = [pulse.validation_loss for pulse in pulses if math.isfinite(pulse.validation_loss)]
        return sum(known) / len(known) if known else math.nan


def merged(state: OuterState, mean: Vector, tokens: Mapping[str, int]) -> OuterState:
    """The state after the merge: the members' mean, shape [parameters], without momentum; equal at all members."""
    anchor, momentum = SharedVector.scratch(len(mean)), SharedVector(len(mean))
    anchor.array[:] = mean
    return OuterState(state.round + 1, tuple(sorted(tokens)), {ANCHOR: anchor, MOMENTUM: momentum}, {})
