"""Attempts of members that exchange their vectors over the simulated network, without rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rounds.cases import CALM, ballot, shares
from simulation.network import Network

from pier_node.base.shared import Vector
from pier_node.outer.codec import codec as codec_of
from pier_node.outer.mean import Update, split, trimmed_mean, weighted_mean
from pier_node.rounds.exchange_plan import Plan, fitting
from pier_node.rounds.reduce import Reduction
from pier_node.rounds.suspects import Suspicion
from pier_node.wire.carrier import Chunk

BALLOT = ballot(1)
SILENCE = 30.0


class Exchange:
    """An attempt of some members, each with its own vector."""

    def __init__(
        self,
        vectors: dict[str, Vector],
        tokens: dict[str, int] | None = None,
        bandwidths: Sequence[float] | None = None,
        chunk: int = 2,
        network: Network | None = None,
        limit: float = 1e6,
        codec: str = "none",
        rule: str = "none",
        norms: Mapping[str, float] | None = None,
    ) -> None:
        length = len(next(iter(vectors.values())))
        owners = fitting(len(vectors))
        shards = split(length, bandwidths or [1.0] * owners) + [(length, 0)] * (len(vectors) - owners)
        dealt = shares(tokens or dict.fromkeys(vectors, 1), shards)
        if norms is not None:
            for share in dealt:
                share.norm = norms.get(share.node, float(np.linalg.norm(vectors[share.node])))
        self.network = network or Network(1, CALM)
        self.carriers = {node: self.network.join(node) for node in vectors}
        self.means = {node: np.full(length, np.nan, np.float32) for node in vectors}
        plan = self.plan = Plan(5, BALLOT, dealt, norm_limit=limit, silence=SILENCE, chunk=chunk)
        self.errors = {node: np.full(length, np.nan, np.float32) for node in vectors}
        self.parts = {
            node: Reduction(
                self.carriers[node],
                plan,
                Update(vectors[node], (tokens or {}).get(node, 1), self.errors[node]),
                self.means[node],
                codec_of(codec),
                rule=trimmed_mean if rule == "trimmed" else weighted_mean,
            )
            for node in sorted(vectors)
        }
        for node, part in self.parts.items():
            self.carriers[node].serve_push(self._taker(part))

    def _taker(self, part: Reduction) -> Callable[[str, AsyncIterator[Chunk]], Any]:
        async def take(sender: str, chunks: AsyncIterator[Chunk]) -> None:
            await part.take(sender, await anext(chunks), chunks)

        return take

    async def run(self) -> None:
        await asyncio.gather(*(part.run() for part in self.parts.values()))

    async def outcome(self, node: str) -> Suspicion | None:
        """What became of one member's part while all took theirs."""
        ends = await asyncio.gather(*(part.run() for part in self.parts.values()), return_exceptions=True)
        end = dict(zip(self.parts, ends, strict=True))[node]
        assert end is None or isinstance(end, Suspicion)
        return end


def vectors(names: Iterable[str], length: int, seed: int = 1) -> dict[str, Vector]:
    dice = np.random.default_rng(seed)
    return {node: dice.standard_normal(length).astype(np.float32) for node in names}
