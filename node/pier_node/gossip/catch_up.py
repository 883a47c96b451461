"""Catching up in a run of pairs: the state with which a site goes on that has none, or is far behind.

Each site has a state of its own, and no quorum has voted for it. So a site fetches the states of up to three others and
takes the median of each element (the coordinate-wise median of Yin et al., arXiv 1803.01498): the replicas of a run are
close to each other, and one that lies cannot move an element beyond what the other two have. A site that has a state
itself and finds only two others is the third. Two sites that offer the same bits, as after a merge, need no third.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import SharedVector
from pier_node.gossip.standing import Standing
from pier_node.outer.mean import norm_limit
from pier_node.outer.state import ANCHOR, MOMENTUM, PIECE, OuterState
from pier_node.rounds.catch_up import Arrival, Tries, Wanted, fetch_state, persist
from pier_node.wire.carrier import Carrier, PeerLost

ENOUGH = 3
"""States of which one may be a liar's."""


class CatchUpInPairs:
    """Fetches states of a run of pairs, of `length` parameters."""

    def __init__(self, carrier: Carrier, standing: Standing, length: int, faults: Faults = NO_FAULTS) -> None:
        self._carrier, self._standing, self._faults = carrier, standing, faults
        self._length = length

    async def state(self, sources: Callable[[], list[str]], own: OuterState | None) -> OuterState | None:
        """A state to continue from, for as long as it takes; None once there are no sources.

        Args:
            sources: returns the sites from whose states to continue, as of now, in the order in which to ask them.
                They are taken as they are: whether they have standing is for the caller to say.
        """
        tries: dict[str, Tries] = defaultdict(lambda: Tries(others=True))
        return await persist(sources, lambda givers: self._middle(givers, own, tries))

    async def _middle(self, givers: Sequence[str], own: OuterState | None, tries: dict[str, Tries]) -> OuterState:
        found: list[OuterState] = []
        lost = PeerLost("", "nobody is there to fetch a state from")
        for node in givers:
            try:
                fetched = await self._fetch(node, own, tries[node])
            except PeerLost as error:
                lost = error
                continue
            if any(fetched.digest == other.digest for other in found):
                return found[0] if len(found) == 1 else fetched
            found.append(fetched)
            if len(found) == ENOUGH:
                break
        if not found:
            raise lost
        if len(found) == ENOUGH - 1 and own is not None:
            found.append(own)
        if len(found) < ENOUGH:
            return found[0]
        return await asyncio.to_thread(median, self._carrier.node, found)

    async def _fetch(self, node: str, own: OuterState | None, tries: Tries) -> OuterState:
        pulse = self._standing.roster.pulses().get(node)
        if pulse is None or not pulse.digest:
            raise PeerLost(node, "it is gone")
        await self._faults.reach(pulse.round, "fetching")
        wanted = Wanted(self._length, pulse.round, digest=pulse.digest)
        givers = [node, *self._standing.holders(pulse.digest)]
        state = (await fetch_state(self._carrier, givers, wanted, tries, Arrival())).state
        if {*state.tensors} != {ANCHOR, MOMENTUM}:
            raise PeerLost(node, f"its state has the vectors {', '.join(state.tensors)}")
        if own is not None and state.norm > (limit := norm_limit(own.norm)):
            raise PeerLost(node, f"its weights have the norm {state.norm:.3g}; {limit:.3g} is allowed")
        return state


def median(node: str, states: Sequence[OuterState]) -> OuterState:
    """The state of `node` that has the median of three states in every element, and in each entry of the ledger."""
    one, other, third = states
    tensors = {name: SharedVector(len(vector.array)) for name, vector in one.tensors.items()}
    for name, out in tensors.items():
        for start in range(0, len(out.array), PIECE):
            part = slice(start, start + PIECE)
            a, b, c = (state.tensors[name].array[part] for state in (one, other, third))
            np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c), out=out.array[part])
    nodes = {it for state in states for it in state.ledger}
    ledger = {it: sorted(state.ledger.get(it, 0) for state in states)[1] for it in nodes}
    made = OuterState(sorted(state.round for state in states)[1], (node,), tensors, ledger)
    _ = made.norm, made.digest  # computed here, away from the event loop
    return made
