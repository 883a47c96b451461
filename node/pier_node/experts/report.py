"""The scores of an ensemble: every domain, and the mean of all; the same whether one machine scored or many sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pier_node.experts.comparison import Result, Standing, compare, standings
from pier_node.experts.gathering import experts_of, gather
from pier_node.experts.sheet import Sheet


@dataclass(frozen=True)
class Report:
    """What came out.

    Attributes:
        experts: names, in the order of the arrays in `domains`.
        mean: over the domains, which count alike.
    """

    experts: list[str]
    domains: dict[str, Result]
    mean: dict[str, Standing]

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)


def evaluated(sheets: Sequence[Sheet], top_k: int = 0) -> Report:
    """Everything that follows from some sheets. Raises PierError: they do not fit together.

    Args:
        top_k: 0: top-1 and top-2 are shown, as far as there are so many experts; else only this one.
    """
    experts, found = experts_of(sheets), gather(sheets)
    top = [k for k in ([top_k] if top_k else [1, 2]) if k <= len(experts)]
    compared = {domain: compare(scored, top) for domain, scored in found.items()}
    order = sorted(found)  # whatever the order of the sheets, the same draws
    mean = standings([compared[domain][1] for domain in order], [found[domain].test.shape[2] for domain in order])
    return Report(experts, {domain: result for domain, (result, _) in compared.items()}, mean)
