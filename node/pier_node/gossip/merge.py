"""The optional end of a run in pairs: merge all sites' anchors into one model, their plain mean.

The merge is not in the NoLoCo paper (arXiv 2506.10911). It is one atomic round, like Pier's, after the last round of
pairs: either all sites that are there end with the same bits, or their models stay as they are. Its base is the set of
sites that are alive when it begins. A site that comes too late takes the result, if it comes with the votes for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from pier_node.base.patience import Backoff
from pier_node.base.shared import SharedVector
from pier_node.base.tasks import first_of
from pier_node.gossip.standing import Standing
from pier_node.outer.mean import Update
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.catch_up import Arrival, Tries, Wanted, fetch_state
from pier_node.rounds.member import Rounds
from pier_node.rounds.proofs import Trusted, follow
from pier_node.rounds.suspects import Behind
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import StateRequest

PATIENCE = 300.0
"""Seconds to wait for sites that have not taken the last round yet, and for the merge while nothing is exchanged."""
LOOK = 5.0
ANSWER = 10.0
"""Seconds for a site to prove that others have merged."""
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

    def __init__(self, carrier: Carrier, standing: Standing, state: OuterState, rounds: Rounds) -> None:
        self._carrier, self._roster, self._standing, self._node = carrier, standing.roster, standing, carrier.node
        self._state, self._rounds = state, rounds
        carrier.serve_push(rounds.take_stream)
        self.members_loss = math.nan

    async def run(self) -> OuterState | None:
        """The merged state, ours or that of others who have merged without us; None (logged) if there is none."""
        await self._rounds.begin(replace(self._state, members=(self._node,), ledger={}), MERGE)
        try:
            return await first_of(self._merge(), self._rounds.run())
        except Behind as behind:
            log.info("the others have merged their models: fetching theirs: %s", behind)
            return await self._fetched_in_time()
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
        there = [node for node, pulse in self._standing.peers().items() if pulse.round >= last]
        return sorted([self._node, *(node for node in there if node in self._roster.participants())])

    def _behind(self, last: int) -> list[str]:
        return [node for node, pulse in self._standing.peers().items() if pulse.round < last]

    async def _merge(self) -> OuterState | None:
        members = await self._members()
        if state := await self._fetched():
            return state
        if len(members) < 2:
            log.info("nobody is here to merge this site's model with")
            return None
        rounds = self._rounds
        await rounds.begin(replace(rounds.state, members=tuple(members)), MERGE)
        state = await first_of(rounds.commit(Update(self._state.anchor, 1), merged), self._until_idle())
        self.members_loss = self._mean_loss(state.members)  # each told its own loss before it came
        return state

    async def _fetched_in_time(self) -> OuterState | None:
        backoff = Backoff()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    if state := await self._fetched():
                        return state
                    await self._roster.changed.wait(backoff.seconds())
        log.warning("this site's model stays as it is, and is not in theirs: nobody who has it is there any more")
        return None

    async def _fetched(self) -> OuterState | None:
        """The result of others who have merged without this site; None if nobody can prove that there is one."""
        for node, pulse in self._standing.peers().items():
            if pulse.round > self._state.round:
                try:
                    return await self._fetched_from(node)
                except (PeerLost, BadMessage) as error:
                    log.warning("%s says that the models are merged, but: %s", self._roster.called(node), error)
        return None

    async def _fetched_from(self, node: str) -> OuterState:
        """The result that a site has. Raises PeerLost or BadMessage."""
        last, length = self._state.round, len(self._state.anchor)
        told = await self._carrier.call(node, DESCRIBE, StateRequest(trusted=last + 1, proof_only=True), ANSWER)
        if len(told.proof) != 1:
            raise BadMessage(f"its result comes with {len(told.proof)} proofs")
        (link,) = told.proof
        proven = follow(Trusted(last, MERGE, tuple(link.members)), link, self._rounds.statements)
        others = sum(map(self._standing.has, self._roster.contacts))
        if sum(self._standing.has(signed.node) for signed in link.votes) < min(2, others):  # of two, one goes on alone
            raise BadMessage("its result has no votes but its own and those of strangers")
        wanted = Wanted(length, proven.round, digest=proven.digest)
        peers = [node, *self._standing.holders(proven.digest)]
        return (await fetch_state(self._carrier, peers, wanted, Tries(), Arrival())).state

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


def merged(state: OuterState, mean: SharedVector, tokens: Mapping[str, int]) -> OuterState:
    """The state after the merge: the members' mean, shape [parameters], without momentum; equal at all members."""
    tensors = {ANCHOR: mean, MOMENTUM: SharedVector(len(mean.array))}
    return OuterState(state.round + 1, tuple(sorted(tokens)), tensors, {})
