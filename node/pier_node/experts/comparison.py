"""Compares mixtures of the same experts on the same rows: bits per byte and perplexity, with confidence intervals.

The scores of an ensemble, by domain and on average, are put together from the score sheets of its experts. The result
is the same whether one machine scored or many sites.

The intervals compare each method with the best one. The prior is fitted on rows of the prior split that are not scored,
and the single best expert is also chosen there. The geometric mean is shown as a diagnostic: it is not a mixture, and
never ranked best.

The prior says which experts a text is for before its first token. It is an exponential mean of the rows' posteriors,
with a floor. HDEE's reference code instead carries the last prior into the next posterior, and so collapses to one
expert even between equal experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
import numpy.typing as npt

from pier_node.base.errors import PierError
from pier_node.base.units import perplexity
from pier_node.experts.mixture import Array, Kind, Rule, follow, geometric, rule, score
from pier_node.experts.sheet import SCORE_AGAIN, Hashes, Parent, Sheet
from pier_node.trainer.data.sources import Split

FORGETTING = 0.3
"""λ, the weight of the newest row (as in the code of BTM and DEMix)."""
FLOOR = 0.01
"""ε: each of K experts gets at least ε / K. This costs a row at most ln(1 / (1 - ε)) nats."""


def even(experts: int) -> Array:
    """Equal weights, [experts]."""
    return np.full(experts, 1 / experts)


def fitted(rule: Rule, log_probs: Array, forgetting: float = FORGETTING) -> Array:
    """Fit the prior to rows of a text.

    Args:
        log_probs: the experts' log-probabilities of the rows' tokens, [experts, rows, tokens].

    Returns:
        [experts], with sum 1 and no value below FLOOR / experts. Every row's posterior starts from equal weights, so
        that the prior does not reinforce itself.
    """
    posteriors = np.exp(follow(rule, even(len(log_probs)), log_probs)).mean(axis=-1)  # [experts, rows]
    prior = even(len(log_probs))
    for row in posteriors.T:
        prior = (1 - forgetting) * prior + forgetting * row
    return floored(prior / prior.sum())


def floored(prior: Array, floor: float = FLOOR) -> Array:
    """Mix in a uniform distribution with weight `floor`, [experts]."""
    return (1 - floor) * prior + floor / len(prior)


def chosen(prior: Array, most: int) -> tuple[npt.NDArray[np.intp], Array]:
    """The experts that answer: the `most` likeliest (0: all); among equals, the first ones.

    Returns:
        Their indices in ascending order, int [k], and their prior with sum 1, [k].
    """
    best = np.sort(np.argsort(-prior, kind="stable")[: most or None])
    return best, prior[best] / prior[best].sum()


ROWS_OF_PRIOR = 100
"""Number of rows of the prior split that fit the prior."""
DRAWS = 1000
LEVEL = 0.95
GEOMETRIC, SINGLE = "geometric", "single"
UNRANKED = (GEOMETRIC,)
"""Methods that are shown as a diagnostic and never ranked best."""

Losses = dict[str, Array]
"""Nats of each row, [rows], by method."""


@dataclass(frozen=True)
class Scored:
    """The scores of all experts on a domain.

    Attributes:
        test, prior: log p, [experts, rows, tokens], of the rows that are scored and of those that fit the prior.
        test_rows, prior_rows: hashes of these rows.
        parents: scores of the rows by the model that each expert branched from; None: not known.
    """

    test: Array
    prior: Array
    test_rows: Hashes
    prior_rows: Hashes
    parents: Sequence[Parent | None] = ()

    @cached_property
    def usable(self) -> npt.NDArray[np.intp]:
        """Indices of the rows of the prior split that are not also scored."""
        return disjoint(self.prior_rows, self.test_rows)


@dataclass(frozen=True)
class Standing:
    """The result of a method.

    Attributes:
        bits_per_byte, perplexity: a token is a byte.
        behind: bits per byte more than the best method.
        low, high: the 95 % interval of `behind`, from a paired bootstrap over rows.
        is_best: the best method.
        is_tied: tied with the best: the interval contains 0.
    """

    bits_per_byte: float
    perplexity: float
    behind: float
    low: float
    high: float
    is_best: bool
    is_tied: bool


@dataclass(frozen=True)
class Result:
    """The result of a domain, by method.

    Attributes:
        rows, tokens: numbers scored.
        prior: the prior fitted for `decay`, [experts].
        left_out: rows excluded from the fit because they are scored.
        single: index of the expert that is best on the prior split.
        experts: bits per byte of each expert alone, [experts].
        forgotten: by how many bits per byte each expert is worse than its parent, [experts]; None: not known.
    """

    standings: dict[str, Standing]
    rows: int
    tokens: int
    prior: list[float]
    left_out: int
    single: int
    experts: list[float]
    forgotten: list[float | None]


def disjoint(prior_rows: Hashes, test_rows: Hashes) -> npt.NDArray[np.intp]:
    """Indices of the rows of the prior split that are not scored: texts can contain repetitions."""
    scored = {row.tobytes() for row in test_rows}
    kept = [index for index, row in enumerate(prior_rows) if row.tobytes() not in scored]
    return np.array(kept, dtype=np.intp)


def losses(found: Scored, top: Sequence[int] = ()) -> tuple[Losses, Array, int]:
    """Nats of each row by every method; the prior of decay; and the index of the single best expert.

    `top`: numbers of experts that decay chooses by its prior.
    """
    usable = found.usable
    usable = usable[np.arange(min(len(usable), ROWS_OF_PRIOR)) * max(1, len(usable) // ROWS_OF_PRIOR)]
    rows = found.prior[:, usable]  # [experts, rows, tokens]
    priors = {kind: _prior(kind, rows) for kind in get_args(Kind)}
    made = {kind: _nats(score(rule(kind), priors[kind], found.test)) for kind in get_args(Kind)}
    for k in top:
        best, prior = chosen(priors["decay"], k)
        made[f"top-{k}"] = _nats(score(rule("decay"), prior, found.test[best]))
    single = int(rows.sum(axis=(1, 2)).argmax()) if len(usable) else 0
    made[SINGLE] = _nats(found.test[single])
    made[GEOMETRIC] = _nats(geometric(found.test))
    return made, priors["decay"], single


def compare(found: Scored, top: Sequence[int] = (), seed: int = 0) -> tuple[Result, Losses]:
    """The result of a domain and the losses behind it. Deterministic for the same arguments."""
    made, prior, single = losses(found, top)
    _, rows, tokens = found.test.shape
    alone = [_bits(_nats(expert), tokens) for expert in found.test]
    before = [
        None if it is None else _bits(-it.astype(np.float64), tokens) for it in found.parents or [None] * len(alone)
    ]
    result = Result(
        standings=standings([made], [tokens], seed),
        rows=rows,
        tokens=rows * tokens,
        prior=prior.tolist(),
        left_out=len(found.prior_rows) - len(found.usable),
        single=single,
        experts=alone,
        forgotten=[None if parent is None else own - parent for own, parent in zip(alone, before)],
    )
    return result, made


def standings(domains: Sequence[Losses], tokens: Sequence[int], seed: int = 0) -> dict[str, Standing]:
    """Results of all methods, averaged over domains with equal weight; `tokens`: row length in each domain."""
    bits = {name: [made[name] / (length * math.log(2)) for made, length in zip(domains, tokens)] for name in domains[0]}
    means = {name: float(np.mean([rows.mean() for rows in each])) for name, each in bits.items()}
    best = min((name for name in means if name not in UNRANKED), key=means.__getitem__)
    draws = _draws([len(rows) for rows in bits[best]], seed)
    return {name: _standing(name, best, bits, means, draws) for name in means}


def _standing(
    name: str,
    best: str,
    bits: Mapping[str, Sequence[Array]],
    means: Mapping[str, float],
    draws: Sequence[npt.NDArray[np.intp]],
) -> Standing:
    gaps = [own - other for own, other in zip(bits[name], bits[best])]
    drawn = np.mean([gap[picks].mean(axis=1) for gap, picks in zip(gaps, draws)], axis=0)  # [DRAWS]
    low, high = (float(value) for value in np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    tied = name != best and name not in UNRANKED and low <= 0
    mean, behind = means[name], means[name] - means[best]
    return Standing(mean, perplexity(mean * math.log(2)), behind, low, high, is_best=name == best, is_tied=tied)


def _draws(rows: Sequence[int], seed: int) -> list[npt.NDArray[np.intp]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, count, (DRAWS, count)).astype(np.intp) for count in rows]


def _prior(kind: Kind, rows: Array) -> Array:
    """Fitted with the rule that mixes; equal weights for `uniform`, the plain mean, and if there are no rows."""
    return even(len(rows)) if kind == "uniform" or not rows.shape[1] else fitted(rule(kind), rows)


def _nats(log_probs: Array) -> Array:
    return np.asarray(-log_probs.sum(axis=-1))


def _bits(nats: Array, tokens: int) -> float:
    return float(nats.mean() / (tokens * math.log(2)))


def experts_of(sheets: Iterable[Sheet]) -> list[str]:
    """Names of the experts, in order of appearance. Raises PierError: one name stands for two sets of weights."""
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
    scores = {}
    for domain in dict.fromkeys(sheet.subject.domain for sheet in sheets):
        test, test_rows = _stacked(found, domain, "test", experts)
        prior, prior_rows = _stacked(found, domain, "prior", experts)
        parents = [found[domain, "test", expert].parent for expert in experts]
        scores[domain] = Scored(test, prior, test_rows, prior_rows, parents)
    return scores


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
        mean: over the domains that have an expert (or, if none has, over all), with equal weight.
        excluded: over the domains that have none: no expert was trained on them. Empty if there are no such domains.
    """

    experts: list[str]
    domains: dict[str, Result]
    mean: dict[str, Standing]
    excluded: dict[str, Standing]


def evaluated(sheets: Sequence[Sheet], top_k: int = 0) -> Report:
    """The complete report from score sheets. Raises PierError: they do not fit together.

    Args:
        top_k: 0: show top-1 and top-2, if there are that many experts; otherwise only this one.
    """
    experts, found = experts_of(sheets), gather(sheets)
    top = [k for k in ([top_k] if top_k else [1, 2]) if k <= len(experts)]
    compared = {domain: compare(scored, top) for domain, scored in found.items()}
    order = sorted(found)  # the same draws, whatever the order of the sheets
    own = [domain for domain in order if domain in experts] or order
    groups = own, [domain for domain in order if domain not in own]
    mean, excluded = (
        standings([compared[domain][1] for domain in group], [found[domain].test.shape[2] for domain in group])
        if group
        else {}
        for group in groups
    )
    return Report(experts, {domain: result for domain, (result, _) in compared.items()}, mean, excluded)
