"""The weight of each member in a round: the tokens it claims to have trained on, as far as they can be true. Pure.

Tokens are claims, since no site sees another one train. Every member bounds a claim by what all members know: the
steps, batch size and sequence length of the run so far, the tokens that the ledger already counts, and the claims of
the others in the round. No claim is refused, since that would let a liar stop rounds: an excessive claim counts for
less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pier_node.config.run import SITES, RunConfig
from pier_node.outer.schedule import Kind, entry, round_plan, start_steps

LIMIT = 2**53 - 1
"""Most tokens of a site that a ledger counts: a manifest cannot hold more (wire/rules.py)."""


@dataclass(frozen=True)
class Weighing:
    """The bounds of one round.

    Attributes:
        claim: most tokens that one site can bring.
        allowed: most tokens of one site that the ledger can have counted after the round.
        whole: tokens of a site that does all inner steps between two rounds.
        most: cap on a site's weight, as a multiple of the members' usual tokens; the cap is `whole` if that is more.
        fragment: the fragment that the round syncs.
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

    def plausible(self, ledger: Mapping[str, int], first: Collection[str]) -> dict[str, int]:
        """The ledger of a run of pairs, as far as it can be true, and small enough for other sites to accept.

        Args:
            first: sites that are kept first if there are too many.
        """
        others = sorted(node for node in ledger if node not in first and "/" not in node)
        most = min(self.allowed, LIMIT)
        return {node: min(ledger[node], most) for node in sorted([*first, *others[: SITES - len(first)]])}


ONE_EACH = Weighing(claim=1, whole=1, most=1.0)
"""Every member counts the same: in the merge of a run of pairs, and in the rounds of a pipeline."""


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
