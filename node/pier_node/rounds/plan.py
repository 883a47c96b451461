"""The plan of an attempt, which all its members know: its name, who owns which shard, and what each may send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pier_node.base.shared import Buffer
from pier_node.outer.clip import EXACT, LOSSY, clip_factors, longest_mean
from pier_node.outer.mean import relative_weights
from pier_node.outer.token_weights import Weighing, capped
from pier_node.wire.chunk import CHUNK_BYTES, Chunk, Stage
from pier_proto.v1.peer_pb2 import Ballot, Share

CHUNK = CHUNK_BYTES // 4


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

    def ranges(self, share: Share) -> list[tuple[int, int]]:
        """First element of each chunk of a shard, and the one after its last."""
        end = share.offset + share.length
        return [(start, min(start + self.chunk, end)) for start in range(share.offset, end, self.chunk)]

    def message(self, stage: Stage, offset: int, data: Buffer) -> Chunk:
        """A chunk of this attempt."""
        return Chunk(round=self.round, ballot=self.ballot, stage=stage, offset=offset, data=data)

    def givers(self) -> list[Share]:
        """Members whose update has a weight."""
        return [share for share in self.shares if share.tokens]

    def weights(self) -> list[np.float32]:
        """Weights of the givers, relative to the largest."""
        tokens, bounds = [share.tokens for share in self.givers()], self.weighing
        return relative_weights(capped(tokens, bounds.whole, bounds.most))

    def over_weight_of(self, node: str) -> float:
        """The weight of all givers together, divided by the weight of one of them."""
        weights = dict(zip((share.node for share in self.givers()), self.weights(), strict=True))
        return float(sum(weights.values())) / float(weights[node])

    def clips(self) -> dict[str, float]:
        """Clipping factor by node, for members whose update is clipped."""
        factors = clip_factors(*self._norms(), self.weighing.whole)
        return {share.node: factor for share, factor in zip(self.shares, factors, strict=True) if factor < 1}

    def longest(self, share: Share, lossy: bool) -> float:
        """Largest L2 norm that a member's update may have on a shard."""
        return min(self.norm_limit, share.norm * (LOSSY if lossy else EXACT))

    def longest_mean(self, lossy: bool) -> float:
        """Largest L2 norm that a shard of the mean may have."""
        return longest_mean(*self._norms(), self.weighing.whole) * (LOSSY if lossy else EXACT)

    def _norms(self) -> tuple[list[float], list[int]]:
        return [share.norm for share in self.shares], [share.tokens for share in self.shares]
