"""How much each member counts in a round: what it claims to have trained on, as far as that can be. Pure.

Tokens are claimed, and nobody sees another site train. What bounds a claim is what every member knows: the steps, the
batch and the sequence length of the run so far, the tokens that the ledger has counted already, and what the others of
the round claim. No claim is refused, since that would let a liar stop rounds: it counts for less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pier_node.config.run import SITES, RunConfig
from pier_node.outer.schedule import Kind, entry, round_plan, start_steps

LIMIT = 2**53 - 1
"""Most tokens that a ledger counts of a site: a manifest holds no more (wire/rules.py)."""


@dataclass(frozen=True)
class Weighing:
    """The bounds of one round.

    Attributes:
        claim: most tokens that one site can bring.
        allowed: most tokens of one site that the ledger can have counted after the round.
        whole: tokens of a site that does all inner steps between two rounds.
        most: weight of a site, over the usual tokens of the members, above which it must not have trained on more
            than `whole` to count for more.
        fragment: that the round syncs.
    """

    claim: int = LIMIT
    allowed: int = LIMIT
    whole: int = LIMIT
    most: float = math.inf
    fragment: int = 0

    def believed(self, claims: Mapping[str, int], ledger: Mapping[str, int]) -> dict[str, int]:
        """Tokens by site, as far as they can be true; with them no count in the ledger exceeds `allowed`."""
        room = min(self.allowed, LIMIT)
        return {
            node: max(0, min(claimed, self.claim, room - ledger.get(entry(node, self.fragment), 0)))
            for node, claimed in claims.items()
        }

    def plausible(self, ledger: Mapping[str, int], first: Collection[str]) -> dict[str, int]:
        """A ledger of a run of pairs, as far as it can be true, and no larger than others would take it.

        Args:
            first: sites that are in it before others, if there are too many.
        """
        others = sorted(node for node in ledger if node not in first and "/" not in node)
        most = min(self.allowed, LIMIT)
        return {node: min(ledger[node], most) for node in sorted([*first, *others[: SITES - len(first)]])}


ONE_EACH = Weighing(claim=1, whole=1, most=1.0)
"""Members that come count alike: in the merge of a run of pairs, and in the rounds of a pipeline."""


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
    """The median of what members bring that bring anything; of an even number the lower one."""
    some = sorted(count for count in tokens if count)
    return some[(len(some) - 1) // 2] if some else 0


def capped(tokens: Sequence[int], whole: int, most: float) -> list[float]:
    """Each member's weight in the mean, in tokens: at most `most` times the usual, or `whole` if that is more."""
    cap = max(float(whole), most * usual_tokens(tokens)) if any(tokens) else 0.0
    return [min(float(count), cap) for count in tokens]
