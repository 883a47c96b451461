"""What all members of an attempt know of its exchange: who owns which shard, what each may send, and who sends to whom.

In a round of up to ONE_LEVEL owners every member sends to every other one. In larger ones the members form a grid, and
each talks to its row and its column only, to about 2·√n others. It sends each owner of its row what the owners of that
one's column need. So each owner has the mean of its row, of all shards of its column, and exchanges these with its
column, as the members of a small round exchange their updates. The means of all come back the same way. A member sends
its vector once, and an owner a √n-th of it once more; no mean leaves before every member has taken part.

A mean of rows' means is the mean of all, because a row weighs as much as its members together. It is not the trimmed
mean, and sparse codes do not stay sparse: such rounds have one level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import numpy as np

from pier_node.base.shared import Buffer
from pier_node.outer.mean import EXACT, LOSSY, Weighing, capped, clip_factors, longest_mean, relative_weights
from pier_node.wire.carrier import CHUNK_BYTES, Chunk, Stage
from pier_proto.v1.peer_pb2 import Ballot, Share

CHUNK = CHUNK_BYTES // 4
ONE_LEVEL = 32
"""Most owners of shards that all send to each other."""
Range = tuple[int, int]
"""First element of a chunk, and the one after its last."""


@dataclass(frozen=True)
class Level:
    """One member's view of who exchanges what: all members, or its row of them, or its column.

    Attributes:
        nodes: who takes part, in node-id order.
        chunks: what each of them averages and gives to the others.
        weights: weight in the mean, of those that give something; in node-id order.
        longest: largest L2 norm of what each of them may give.
        clips: factors by which updates are shortened.
        longest_mean: largest L2 norm that what one of them averages may have.
        silence: seconds without a chunk after which one that gives something counts as lost.
        silence_of_means: the same for one that averages: it may wait for others itself.
    """

    nodes: Sequence[str]
    chunks: Mapping[str, Sequence[Range]]
    weights: Mapping[str, np.float32]
    longest: Mapping[str, float]
    clips: Mapping[str, float]
    longest_mean: float
    silence: float
    silence_of_means: float

    def over_weight_of(self, node: str) -> float:
        """The weight of all together, divided by the weight of one; 0 if that gives nothing."""
        return float(self.total()) / float(self.weights[node]) if node in self.weights else 0.0

    def total(self) -> np.float32:
        """The weight of all together."""
        return sum(self.weights.values(), start=np.float32(0))

    def longest_row_mean(self, lossy: bool) -> float:
        """Largest L2 norm of the mean of what these give, as others decode it."""
        sums = [float(weight) * self.longest[node] * self.clips.get(node, 1.0) for node, weight in self.weights.items()]
        return (LOSSY if lossy else EXACT) * sum(sums) / (float(self.total()) or 1.0)


@dataclass(frozen=True)
class Plan:
    """The plan of one attempt; shares are in node-id order."""

    round: int
    ballot: Ballot
    shares: Sequence[Share]
    norm_limit: float
    """Largest L2 norm that a member's shard may have, whatever the norms of the others."""
    silence: float
    """Seconds without a chunk after which a sender counts as lost."""
    chunk: int = CHUNK
    """Elements in a chunk."""
    weighing: Weighing = field(default_factory=Weighing)
    """Bounds on the weight of the members' tokens."""

    def ranges(self, share: Share) -> list[Range]:
        """The chunks of a shard."""
        end = share.offset + share.length
        return [(start, min(start + self.chunk, end)) for start in range(share.offset, end, self.chunk)]

    def message(self, stage: Stage, offset: int, data: Buffer) -> Chunk:
        """A chunk of this attempt."""
        return Chunk(round=self.round, ballot=self.ballot, stage=stage, offset=offset, data=data)

    @cached_property
    def weights(self) -> dict[str, np.float32]:
        """Weights of the members whose update has one, relative to the largest."""
        tokens = {share.node: share.tokens for share in self.shares if share.tokens}
        bounds = self.weighing
        return dict(zip(tokens, relative_weights(capped([*tokens.values()], bounds.whole, bounds.most)), strict=True))

    @cached_property
    def clips(self) -> dict[str, float]:
        """Clipping factor by node, for members whose update is clipped."""
        factors = clip_factors(*self._norms(), self.weighing.whole)
        return {share.node: factor for share, factor in zip(self.shares, factors, strict=True) if factor < 1}

    def one_level(self, lossy: bool) -> Level:
        """Every member sends to every other one."""
        return self._level([it.node for it in self.shares], {it.node: [it] for it in self.shares}, lossy)

    def two_levels(self, node: str, lossy: bool) -> tuple[Level, Level | None] | None:
        """The row of a member and, if it owns a shard, its column; None if one level will do."""
        if not (grid := rows(self.shares)):
            return None
        shares = {share.node: share for share in self.shares}
        columns = [*zip(*(row.owners for row in grid), strict=True)]
        mine = next(row for row in grid if node in row.nodes)
        owned = {owner: [shares[it] for it in column] for owner, column in zip(mine.owners, columns, strict=True)}
        # A mean has come through its owner's row, its column, and the column of a member's own row.
        in_row = replace(self._level(mine.nodes, owned, lossy), silence_of_means=6 * self.silence)
        if node not in mine.owners:
            return in_row, None
        column = columns[mine.owners.index(node)]
        all_rows = [self._level(row.nodes, {}, lossy) for row in grid]
        totals = {it: row.total() for it, row in zip(column, all_rows, strict=True)}
        in_column = Level(
            nodes=column,
            chunks={it: self.ranges(shares[it]) for it in column},
            weights={it: total for it, total in totals.items() if total},
            longest={it: row.longest_row_mean(lossy) for it, row in zip(column, all_rows, strict=True)},
            clips={},
            longest_mean=in_row.longest_mean,
            silence=2 * self.silence,
            silence_of_means=4 * self.silence,
        )
        return in_row, in_column

    def _level(self, nodes: Sequence[str], owned: Mapping[str, Sequence[Share]], lossy: bool) -> Level:
        """What these members do with their updates, if each averages these shards."""
        tolerance, here = LOSSY if lossy else EXACT, {*nodes}
        longest = min(longest_mean(*self._norms(), self.weighing.whole), self.norm_limit * math.sqrt(len(self.shares)))
        return Level(
            nodes=nodes,
            chunks={node: _in_turn([self.ranges(share) for share in owned.get(node, ())]) for node in nodes},
            weights={node: weight for node, weight in self.weights.items() if node in here},
            longest={it.node: min(self.norm_limit, it.norm * tolerance) for it in self.shares if it.node in here},
            clips={node: factor for node, factor in self.clips.items() if node in here},
            longest_mean=longest * tolerance,
            silence=self.silence,
            silence_of_means=2 * self.silence,
        )

    def _norms(self) -> tuple[list[float], list[int]]:
        return [share.norm for share in self.shares], [share.tokens for share in self.shares]


def _in_turn(shards: Sequence[Sequence[Range]]) -> list[Range]:
    """One chunk of each shard after the other, so that no owner has to wait until the shards of others are complete."""
    return [chunk for turn in zip_longest(*shards) for chunk in turn if chunk]


@dataclass(frozen=True)
class Row:
    """A row of the grid; `others` own no shard."""

    owners: Sequence[str]
    others: Sequence[str]

    @cached_property
    def nodes(self) -> list[str]:
        """All of the row, in node-id order."""
        return sorted([*self.owners, *self.others])


def rows(shares: Sequence[Share]) -> list[Row]:
    """The grid of a round with two levels; empty if it has one."""
    owners = [share.node for share in shares if share.length]
    others = [share.node for share in shares if not share.length]
    columns = math.isqrt(len(owners))
    if len(owners) <= ONE_LEVEL or len(owners) % columns:
        return []
    count = len(owners) // columns
    return [Row(owners[at * columns : (at + 1) * columns], others[at::count]) for at in range(count)]


def fitting(owners: int) -> int:
    """How many of so many owners of shards fill the rows of a grid; all of them if a grid would be too small."""
    full = owners - owners % max(1, math.isqrt(owners))
    return full if full > ONE_LEVEL else owners
