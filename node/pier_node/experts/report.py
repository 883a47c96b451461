"""The scores of an ensemble, by domain and on average, put together from the score sheets of its experts.

The result is the same whether one machine scored or many sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pier_node.base.errors import PierError
from pier_node.experts.comparison import Result, Scored, Standing, compare, standings
from pier_node.experts.mixture import Array
from pier_node.experts.sheet import SCORE_AGAIN, Hashes, Sheet
from pier_node.trainer.data.sources import Split


def experts_of(sheets: Iterable[Sheet]) -> list[str]:
    """Names of the experts, in order of appearance.

    Raises:
        PierError: one name stands for two sets of weights.
    """
    weights: dict[str, str] = {}
    for sheet in sheets:
        about = sheet.subject
        if weights.setdefault(about.expert, about.weights) != about.weights:
            raise PierError(f"two experts of {about.expert} were scored", "Give the sheets of one of them.")
    return [*weights]


def distinct(sheets: Iterable[Sheet]) -> list[Sheet]:
    """Drop sheets of an expert whose weights equal another's: a parent that stands in for several counts once."""
    first: dict[str, str] = {}
    return [it for it in sheets if first.setdefault(it.subject.weights, it.subject.expert) == it.subject.expert]


def gather(sheets: Sequence[Sheet]) -> dict[str, Scored]:
    """The scores of all experts by domain; axis 0 in the order of `experts_of`.

    Raises:
        PierError: a sheet is missing, or two experts were scored on different rows.
    """
    experts = experts_of(sheets)
    found = {(each.subject.domain, each.subject.split, each.subject.expert): each for each in sheets}
    domains = dict.fromkeys(sheet.subject.domain for sheet in sheets)
    return {domain: _scored(found, domain, experts) for domain in domains}


def _scored(found: dict[tuple[str, Split, str], Sheet], domain: str, experts: Sequence[str]) -> Scored:
    test, test_rows = _stacked(found, domain, "test", experts)
    prior, prior_rows = _stacked(found, domain, "prior", experts)
    parents = [found[domain, "test", expert].parent for expert in experts]
    return Scored(test, prior, test_rows, prior_rows, parents)


def _stacked(
    found: dict[tuple[str, Split, str], Sheet], domain: str, split: Split, experts: Sequence[str]
) -> tuple[Array, Hashes]:
    missing = [expert for expert in experts if (domain, split, expert) not in found]
    if missing:
        raise PierError(f"the expert of {missing[0]} was not scored on {split} rows of {domain}", SCORE_AGAIN)
    sheets = [found[domain, split, expert] for expert in experts]
    first = sheets[0]
    for sheet in sheets[1:]:
        if sheet.log_probs.shape != first.log_probs.shape or not np.array_equal(sheet.rows, first.rows):
            raise PierError(
                f"the experts of {first.subject.expert} and {sheet.subject.expert} were scored on unlike {split} rows "
                f"of {domain}",
                "Score them with the same --rows and the same text: that of Python depends on its version.",
            )
    return np.stack([sheet.log_probs for sheet in sheets]).astype(np.float64), first.rows


@dataclass(frozen=True)
class Report:
    """The scores of an ensemble.

    Attributes:
        experts: names, in the order of the arrays in `domains`.
        domains: result of each domain.
        mean: over the domains, with equal weight.
    """

    experts: list[str]
    domains: dict[str, Result]
    mean: dict[str, Standing]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, for scripts."""
        return asdict(self)


def evaluated(sheets: Sequence[Sheet], top_k: int = 0) -> Report:
    """The complete report from score sheets. Raises PierError: they do not fit together.

    Args:
        top_k: 0: show top-1 and top-2, if there are that many experts; otherwise only this one.
    """
    experts, found = experts_of(sheets), gather(sheets)
    top = [k for k in ([top_k] if top_k else [1, 2]) if k <= len(experts)]
    compared = {domain: compare(scored, top) for domain, scored in found.items()}
    order = sorted(found)  # the same draws, whatever the order of the sheets
    mean = standings([compared[domain][1] for domain in order], [found[domain].test.shape[2] for domain in order])
    return Report(experts, {domain: result for domain, (result, _) in compared.items()}, mean)
