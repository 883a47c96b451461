"""Sites that meet in pairs over the simulated network, without training, for the tests beside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np
from rounds.cases import CALM, LENGTH, Neighbour, acquainted, nonces, outer_state
from simulation.network import Network, Weather
from simulation.statements import PlainStatements
from simulation.virtual_time import run

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.tasks import Signal
from pier_node.config.run import NolocoSection
from pier_node.gossip.pair_commit import PairTools, Records
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.gossip.standing import Standing
from pier_node.outer.codec.interface import Plain
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState
from pier_proto.v1.peer_pb2 import Pulse, Site

SEED, LAST = 1, 100


class PairMemory:
    """Records of pairs as a disk would keep them; the diary tells in which order things became durable."""

    def __init__(self, diary: list[str]) -> None:
        self.diary, self.records, self.changed = diary, Records(), Signal()

    def load(self) -> Records:
        return self.records

    def keep(self, records: Records) -> None:
        self.diary.append("doubt" if records.doubts else "record")
        self.records = records
        self.changed.notify()


class PairMember(Neighbour):
    """A site that holds pairs: carrier, roster and PairRounds."""

    def __init__(
        self,
        network: Network,
        node: str,
        state: OuterState | None = None,
        rates: NolocoSection | None = None,
        faults: Faults = NO_FAULTS,
        records: Records | None = None,
        founder: str = "",
    ) -> None:
        super().__init__(network, node)
        self.journal = PairMemory(self.diary)
        self.journal.records = records or Records()
        standing = Standing(self.roster, founder, PlainStatements(node))
        place = self.carrier, self.roster, standing, self.journal
        self.tools = PairTools(*place, rates or NolocoSection(), Plain(), faults, 5)
        self.pairs = PairRounds(self.tools, SEED, LAST, state or outer_state([node]), nonces(node))

    def pulse(self) -> Pulse:
        state = self.pairs.state
        site, vouches = Site(node=self.node), self.pairs.vouches
        return Pulse(site=site, phase=self.phase, round=state.round, digest=state.digest, vouches=vouches)

    def bring(self, amount: float, tokens: int = 1, number: int | None = None) -> asyncio.Task[OuterState]:
        """Take the next round with φ less `amount` in every place."""
        weights = (self.pairs.state.anchor - np.float32(amount)).astype(np.float32)
        coming = number or self.pairs.coming()
        return self.play(self.pairs.commit(coming, Update(weights, tokens), self.save))

    async def durable(self, what: str) -> None:
        """Return once the diary has it."""
        await self.journal.changed.until(lambda: what in self.diary)

    async def save(self) -> None:
        self.diary.append(f"saved {self.pairs.state.round}")
        self.pairs.saved = self.pairs.state.round


Play = Callable[[Network, dict[str, PairMember]], Coroutine[Any, Any, None]]


async def together(sites: Mapping[str, PairMember]) -> None:
    """The sites a and b take the next round."""
    await asyncio.gather(sites["a"].bring(0.1), sites["b"].bring(0.3))


def scene(
    play: Play, names: str = "ab", rates: NolocoSection | None = None, weather: Weather = CALM, **faults: Faults
) -> dict[str, PairMember]:
    """Sites with one-letter names that know each other, and what happens to them."""
    members: dict[str, PairMember] = {}

    async def main() -> None:
        network = Network(1, weather)
        for node in names:
            members[node] = PairMember(network, node, rates=rates, faults=faults.get(node, NO_FAULTS))
        for member in members.values():
            member.meet(*names)
        await acquainted(members)
        await play(network, members)

    run(main())
    return members


def hold_at(phase: str, held: asyncio.Event | None = None) -> Faults:
    """Stop there for ever, or until `held` is set."""

    async def strike(round: int, reached: str) -> None:
        if reached == phase:
            await (held or asyncio.Event()).wait()

    return Faults(strike)


__all__ = ["LENGTH", "PairMember", "acquainted", "hold_at", "scene", "together"]
