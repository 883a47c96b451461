"""How the updates of a round become one: what a site brings, its weight, clipping, the mean, and the shards of it.

A site checks its own update first, and drops one that the others would refuse. Weights are the tokens that a member
trained on since its last round. They are claims, since no site sees another one train. Every member bounds a claim by
what all members know: the steps, batch size and sequence length of the run so far, the tokens that the ledger already
counts, and the claims of the others in the round. No claim is refused, since that would let a liar stop rounds: an
excessive claim counts for less.

Clipping limits how far one member can move the model in a round, by shortening updates much longer than usual. The
usual norm is the median of the members' norms. Each member counts with its tokens, but with at most the median of the
tokens. So a single member, whatever it claims, never makes up half of the votes (of two members, the shorter update is
the usual one). A member with more tokens than the median may bring a proportionally longer update, up to what all inner
steps of a round allow. Without clipping, a site with 0.6 % of the data moved a model by 5.5 times its own norm
(MediSwarm, issue 566). Each member announces its norm with its tokens, so all owners of shards clip by the same
factors. An owner sees only its own shard of an update. It refuses a shard that is longer than the norm announced for
the whole update: with n shards, a liar gets at most √n times its share through. The owners' means are bounded likewise.

The plain mean is token-weighted, Σ w·x / Σ w. With equal weights it is the mean of DiLoCo (arXiv 2311.08105) and Pier
(arXiv 2511.17849). The trimmed mean averages the middle third of the weight in each place, after Yin et al.,
"Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (arXiv 1803.01498), which has equal weights.

Shards are sized to each member's bandwidth. Member i with the fraction f_i of a vector of V bytes sends (1 − f_i)·V to
the other owners and f_i·V to each of the n − 1 others: V·(1 + f_i·(n − 2)) in all, and receives as much. The slowest
link decides, so we minimise

    max_i (1 + f_i·(n − 2)) / b_i     with  Σ f_i = 1,  f_i ≥ 0.

At the optimum every member with f_i > 0 takes the same time t, so f_i(t) = max(0, (t·b_i − 1) / (n − 2)). Σ f_i(t) is
non-decreasing in t, and t is found by walking through the members from the fastest down. With n ≤ 2 every split costs
the same. Compare hivemind's load balancing, which solves the same problem as a linear program.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from pier_node.base.errors import PierError
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import SITES, RunConfig
from pier_node.outer.schedule import Kind, RoundPlan, entry, round_plan, start_steps
from pier_node.outer.state import OuterState, in_pieces, l2_norm

log = logging.getLogger(__name__)

LIMIT = 2**53 - 1
"""Most tokens of a site that a ledger counts: a manifest cannot hold more (wire/rules.py)."""


@dataclass(frozen=True)
class Weighing:
    """The bounds of one round: what a member can bring, who may lead it, and who owns a shard of its mean.

    Attributes:
        claim: most tokens that one site can bring.
        allowed: most tokens of one site that the ledger can have counted after the round.
        whole: tokens of a site that does all inner steps between two rounds.
        most: cap on a site's weight, as a multiple of the members' usual tokens; the cap is `whole` if that is more.
    """

    claim: int = LIMIT
    allowed: int = LIMIT
    whole: int = LIMIT
    most: float = math.inf
    fragment: int = 0

    def believed(self, claims: Mapping[str, int], ledger: Mapping[str, int]) -> dict[str, int]:
        """Tokens by site, as far as they can be true; with these, no count in the ledger exceeds `allowed`."""
        room = min(self.allowed, LIMIT)
        return {
            node: max(0, min(claimed, self.claim, room - ledger.get(entry(node, self.fragment), 0)))
            for node, claimed in claims.items()
        }

    def leaders(self, state: OuterState) -> Collection[str]:
        """Who may lead the round after a state, unless none of them is here."""
        return state.members

    def owners(self, state: OuterState, group: Collection[str]) -> list[str]:
        """Who owns a shard of the mean in the round after a state, and so could make up that part.

        Strangers, which were no members of the last round, own none unless they are the most.
        """
        members = [node for node in group if node in state.members]
        return members if 2 * len(members) >= len(group) else [*group]

    def plausible(self, ledger: Mapping[str, int], first: Collection[str]) -> dict[str, int]:
        """The ledger of a run of pairs, as far as it can be true, and small enough for other sites to accept.

        Args:
            first: sites that are kept first if there are too many.
        """
        others = sorted(node for node in ledger if node not in first and "/" not in node)
        most = min(self.allowed, LIMIT)
        return {node: min(ledger[node], most) for node in sorted([*first, *others[: SITES - len(first)]])}


ONE_EACH = Weighing(claim=1, whole=1, most=1.0)
"""Every member counts the same: in the merge of a run of pairs."""


def weighing(config: RunConfig, number: int) -> Weighing:
    """The bounds of round `number`. A site that missed rounds brings what it trained on meanwhile."""
    outer, plan = config.outer, round_plan(config, number)
    done = plan.first_step + plan.steps
    alone = min(done, start_steps(config)) if outer.start == "solo" else 0
    step, batches = config.step_tokens, done + (config.run.sites - 1) * alone
    whole = step * (1 if plan.kind is Kind.SYNC else outer.inner_steps)
    allowed = min(step * batches, LIMIT)
    return Weighing(allowed=allowed, whole=whole, most=outer.max_weight, fragment=plan.fragment)


def usual_tokens(tokens: Sequence[int]) -> int:
    """The median of the nonzero token counts; the lower one of the two middle counts if their number is even."""
    some = sorted(count for count in tokens if count)
    return some[(len(some) - 1) // 2] if some else 0


def capped(tokens: Sequence[int], whole: int, most: float) -> list[float]:
    """Each member's weight in the mean, in tokens: at most `most` times the usual, or `whole` if that is more."""
    cap = max(float(whole), most * usual_tokens(tokens)) if any(tokens) else 0.0
    return [min(float(count), cap) for count in tokens]


Mean = Callable[[Sequence[Vector], Sequence[np.float32], Vector], None]
"""(vectors of equal length, relative weights, out)."""


def relative_weights(tokens: Sequence[float]) -> list[np.float32]:
    """Weights relative to the largest: equal tokens give exactly 1, so their mean is the plain mean to the last bit."""
    largest = max(tokens, default=0) or 1
    return [np.float32(count / largest) for count in tokens]


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[np.float32], out: Vector) -> None:
    """Mean of vectors of equal length, summed in the given order; zero if there are none."""
    if not vectors:
        out.fill(0)
        return
    total = vectors[0]
    if weights[0] != 1 or len(vectors) == 1:
        total = np.multiply(total, weights[0], out=out)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        total = np.add(total, vector if weight == 1 else vector * weight, out=out)
    np.divide(out, np.float32(sum(weights, start=np.float32(0))), out=out)


def trimmed_mean(vectors: Sequence[Vector], weights: Sequence[np.float32], out: Vector) -> None:
    """Mean in each place, without the third of the weight with the largest values and the third with the smallest."""
    out.fill(0)
    if not vectors:
        return
    whole = sum(weights, start=np.float32(0))
    first, last, done = whole / 3, whole * 2 / 3, np.zeros(len(out), np.float32)
    for value, weight in _sorted(vectors, weights):
        end = done + weight
        kept = np.clip(np.minimum(end, last) - np.maximum(done, first), 0, None)
        np.add(out, value * kept, out=out)
        done = end
    np.divide(out, last - first, out=out)


def _sorted(vectors: Sequence[Vector], weights: Sequence[np.float32]) -> list[tuple[Vector, Vector]]:
    """Sort each place by value, with weights; for a few long vectors, comparing neighbors is the fastest way."""
    pairs = [(vector, np.full_like(vector, weight)) for vector, weight in zip(vectors, weights, strict=True)]
    for end in range(len(pairs) - 1, 0, -1):
        for number in range(end):
            (low, light), (high, heavy) = pairs[number : number + 2]
            swap = low > high
            pairs[number] = np.minimum(low, high), np.where(swap, heavy, light)
            pairs[number + 1] = np.maximum(low, high), np.where(swap, light, heavy)
    return pairs


TALLEST = 100.0
"""A measured bandwidth counts for at most this many times the median."""
FASTEST = 1e12
"""Bytes per second that any measured bandwidth counts for at most, so that sums of them are finite."""


def fractions(bandwidths: Sequence[float]) -> list[float]:
    """The fraction of the vector that each member reduces; a bandwidth below 1 byte/s counts as unknown."""
    count = len(bandwidths)
    rates = _plausible(bandwidths)
    if count <= 2:
        return [1 / count] * count
    fastest = sorted(rates, reverse=True)
    total, time = 0.0, 0.0
    for owners, rate in enumerate(fastest, start=1):
        total += rate
        time = (count - 2 + owners) / total
        if owners == count or time * fastest[owners] <= 1:
            break
    shares = [max(0.0, (time * rate - 1) / (count - 2)) for rate in rates]
    return [share / sum(shares) for share in shares]


def split(length: int, bandwidths: Sequence[float]) -> list[tuple[int, int]]:
    """Shards (offset, length), in member order, that cover `length` elements exactly."""
    bounds, done = [0], 0.0
    for share in fractions(bandwidths):
        done += share
        bounds.append(min(length, round(done * length)))
    bounds[-1] = length
    return [(start, end - start) for start, end in pairwise(bounds)]


def _plausible(bandwidths: Sequence[float]) -> list[float]:
    rates = [min(rate, FASTEST) for rate in bandwidths]
    known = sorted(rate for rate in rates if rate >= 1)
    typical = known[len(known) // 2] if known else 1.0
    return [min(max(rate, typical / TALLEST), typical * TALLEST) if rate >= 1 else typical for rate in rates]


LONGEST = 3.0
"""Limit as a multiple of the median norm, for members with no more tokens than the median."""
EXACT, LOSSY = 1.01, 2.0
"""How much longer than announced an update may appear: with rounding only, and with a lossy codec."""


def median_norm(norms: Sequence[float], tokens: Sequence[int]) -> float:
    """The usual norm: the smallest norm that covers half of the counted tokens, or 0 if no update has a length.

    Each member counts with at most the median of the members' tokens.
    """
    usual = usual_tokens(tokens)
    pairs = sorted((norm, min(count, usual)) for norm, count in zip(norms, tokens, strict=True) if norm and count)
    half, done = sum(count for _, count in pairs) / 2, 0
    for norm, count in pairs:
        done += count
        if done >= half:
            return norm
    return 0.0


def longest_updates(norms: Sequence[float], tokens: Sequence[int], whole: int) -> list[float]:
    """Largest allowed norm of each member's update.

    Args:
        whole: tokens of a site that does all inner steps of a round.
    """
    longest, usual = LONGEST * median_norm(norms, tokens), usual_tokens(tokens)
    return [longest * max(1.0, min(count, whole) / usual) if usual else longest for count in tokens]


def clip_factors(norms: Sequence[float], tokens: Sequence[int], whole: int) -> list[float]:
    """The factor that each member's update is multiplied by, at most 1."""
    limits = longest_updates(norms, tokens, whole)
    return [
        limit / norm if count and norm > limit * EXACT else 1.0
        for norm, count, limit in zip(norms, tokens, limits, strict=True)
    ]


def longest_mean(norms: Sequence[float], tokens: Sequence[int], whole: int) -> float:
    """Largest L2 norm that a mean of the clipped updates can have, weighted or trimmed."""
    return max(longest_updates(norms, tokens, whole), default=0.0) * math.sqrt(np.count_nonzero(tokens))


NORM_LIMIT = 100.0
"""Limit on the norm of an update, as a multiple of the norm of the model."""


ONE = np.float32(1)


class Values(Protocol):
    """fp32 values, in a vector or in fewer bytes (`Rounded`); shape [n]."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Vector: ...

    def __setitem__(self, part: slice, values: Vector | float, /) -> None: ...


@dataclass(frozen=True)
class Update:
    """A vector of the length that the round syncs, with its weight in tokens.

    Attributes:
        vector: what is sent, without the residual.
        error: receives what a lossy codec drops of what is sent, same shape; None with a lossless codec.
        residual: what it dropped earlier, same shape; None if nothing of it is sent again.
        decay: the part of the residual that is sent again.
    """

    vector: Vector
    tokens: int
    error: Values | None = None
    residual: Values | None = None
    decay: np.float32 = ONE

    def sent(self, part: slice = slice(None)) -> Vector:
        """What is sent of some elements. It is made when it is needed: memory holds no sum as long as the vector."""
        vector = self.vector[part]
        return vector if self.residual is None else vector + self.decay * self.residual[part]

    @cached_property
    def norm(self) -> float:
        """L2 norm of what is sent; 0 for an update without tokens, which is not sent."""
        if not self.tokens:
            return 0.0
        return math.sqrt(math.fsum(in_pieces(lambda piece: l2_norm(self.sent(piece)) ** 2, len(self.vector))))

    def copied(self) -> SharedVector:
        """The mean of this update alone: a copy of what is sent."""
        copy = SharedVector.scratch(len(self.vector))
        in_pieces(lambda piece: np.copyto(copy.array[piece], self.sent(piece)), len(self.vector))
        return copy


def norm_limit(norm: float) -> float:
    """The largest L2 norm of an update to the round that follows an anchor of this norm."""
    return NORM_LIMIT * max(1.0, norm)


def worth_sending(plan: RoundPlan, update: Update, anchor_norm: float) -> Update:
    """The update, or an empty one (which is logged) if training diverged.

    Raises:
        PierError: training diverged in a solo start, where no other site has an update either.
    """
    norm, limit = update.norm, norm_limit(anchor_norm)
    if plan.kind is Kind.SOLO and not math.isfinite(norm):
        raise PierError(
            f"round {plan.round}: training diverged: the weights are not finite any more",
            "Found a new run with a lower inner.lr; this one's last checkpoint is as it was.",
        )
    if plan.kind is Kind.SOLO or norm <= limit:
        return update
    log.error("round %d: this site's update is dropped: its norm is %.3g: lower inner.lr?", plan.round, norm)
    return Update(np.zeros_like(update.vector), 0)
