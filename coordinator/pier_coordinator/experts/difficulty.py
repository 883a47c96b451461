"""Difficulty of domains: where extra size pays and where extra steps pay. A high loss alone is no reason for either.

u_size(j) = v_j (L_S - L_L) / ((F_L - F_S) T)   and   u_step(j) = v_j (L(T) - L(T')) / ((T' - T) F_M)

Losses are predicted. The loss of the smallest model, z0, only breaks ties. Intervals come from a bootstrap over the
scored rows. HDEE (arXiv 2502.19385) sets difficulty by hand; this estimate is not in the paper.

Short probes of all domains are measured with byte n-grams, which stand in for the models S, M and L. A longer context
stands for more size, more text for more steps. They sort domains into classes, and allocate nothing: what n-grams gain
from more text was found unrelated to what experts gain from more steps (docs/results.md). The n-grams use Witten and
Bell's interpolation (IEEE Trans. Information Theory 37, 1991),

    p_o(x | c) = (n(c, x) + r(c) · p_{o-1}(x | c')) / (n(c) + r(c)),

where r(c) counts the different bytes that followed c, and c' is c without its first byte.

To the probes of each domain a law is fitted, for a model of N parameters after T tokens:

    L̂_j(N, T) = E_j + A_j / N^α + B_j / (T0 + T)^β

The form is that of Hoffmann et al., arXiv 2203.15556. All domains share the exponents and T0, because a few short
probes of each domain do not determine them. With these fixed, E, A and B follow from a linear least-squares fit with
non-negative coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np
import numpy.typing as npt

from pier_node.experts.mixture import Array

DRAWS = 200
"""Number of bootstrap draws."""
INTERVAL = (2.5, 97.5)
"""Percentiles that bound an interval."""
EASY, MEDIUM, HARD = 0, 1, 2
ESTIMATED = -1
"""In place of a class that was set by hand."""
ORDERS = (2, 3, 4)
"""Bytes of context for S, M and L."""
PARTS = (0.25, 0.5, 1.0)
"""Fractions of the sample that are trained on."""
ROW = 512
"""Number of bytes in a scored row."""
ALPHAS = (0.2, 0.34, 0.5, 0.8)
BETAS = (0.15, 0.2, 0.28, 0.4, 0.6, 0.9)
TOKENS_PER_PARAMETER = 60.0
"""Tokens of training for which an expert has the right size. Hoffmann et al., arXiv 2203.15556, find 20 for models that
are trained from nothing; experts begin as copies of S, widened, and were measured to need more (docs/results.md)."""
FLOPS_PER_PARAMETER = 6
"""FLOPs of training for each token and parameter that computes."""
EXPONENTS = (0.34, 0.28)
"""α and β of transformers: the same, Eq. 10."""
WARM = (0.0, 0.1, 0.3, 1.0, 3.0)
"""The exponents that are tried, and T0 as multiples of the longest probe's tokens."""
SUBSETS = [[index for index in range(3) if mask >> index & 1] for mask in range(1, 8)]
"""Which of E, A and B are not 0: all non-empty subsets."""
Classes = npt.NDArray[np.intp]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """Text of a domain: `train` to train on, `held_out` to score."""

    train: bytes
    held_out: bytes


@dataclass(frozen=True)
class Probes:
    """Losses of short probes.

    Attributes:
        parameters, tokens: parameters and tokens of each probe, [points].
        losses: bits per byte of each scored row, [domains, points, rows]; all points score the same rows.
    """

    parameters: Array
    tokens: Array
    losses: Array


def probed(samples: Sequence[Sample], parameters: Array) -> Probes:
    """Probe all domains, each with as much text as the smallest sample has.

    Args:
        samples: one per domain.
        parameters: number of parameters of S, M and L, [3].

    Raises:
        ValueError: a sample has fewer than two rows to score; its index is the argument.
    """
    rows = min(len(sample.held_out) for sample in samples) // ROW
    if rows < 2:
        raise ValueError(min(range(len(samples)), key=lambda index: len(samples[index].held_out)))
    length = min(len(sample.train) for sample in samples)
    counts = [int(part * length) for part in PARTS]
    losses = [
        np.concatenate([_rows(sample.train[:count], sample.held_out[: rows * ROW]) for count in counts])
        for sample in samples
    ]
    points = len(PARTS)
    return Probes(np.tile(parameters, points), np.repeat(np.array(counts, float), len(ORDERS)), np.stack(losses))


def _rows(train: bytes, text: bytes) -> Array:
    """Bits per byte of each row, [orders, rows]."""
    return np.asarray(bits(train, text, ORDERS).reshape(len(ORDERS), -1, ROW).mean(axis=-1))


def bits(train: bytes, text: bytes, orders: Sequence[int]) -> Array:
    """Score the bytes of `text` with a model of each order, trained on `train`.

    Args:
        orders: bytes of context, from 0 to 6, in ascending order.

    Returns:
        -log2 p in bits, [orders, bytes].
    """
    chance, found = np.full(len(text), 1 / 256), []
    for order in range(orders[-1] + 1):
        chance = _interpolated(train, text, order, chance)
        if order in orders:
            found.append(-np.log2(chance))
    return np.stack(found)


def _interpolated(train: bytes, text: bytes, order: int, shorter: Array) -> Array:
    """p_o of each byte of a text, from p_{o-1} (`shorter`); both are [bytes]."""
    grams, counts = np.unique(_codes(train, order + 1), return_counts=True)
    contexts, first = np.unique(grams >> 8, return_index=True)
    total = np.add.reduceat(counts, first)
    followers = np.diff(np.append(first, len(grams)))
    asked = _codes(text, order + 1)
    seen, known = _looked_up(grams, counts, asked), _looked_up(contexts, total, asked >> 8)
    weight = _looked_up(contexts, followers, asked >> 8)
    return np.asarray(np.where(known > 0, (seen + weight * shorter) / np.maximum(known + weight, 1), shorter))


def _codes(text: bytes, length: int) -> Codes:
    """Each byte and those before it, `length` in total, as a number; zeros precede the text."""
    padded = np.frombuffer(bytes(length - 1) + text, dtype=np.uint8).astype(np.int64)
    codes = np.zeros(len(text), dtype=np.int64)
    for back in range(length):
        codes = (codes << 8) | padded[back : back + len(text)]
    return codes


def _looked_up(keys: Codes, values: npt.NDArray[np.intp], asked: Codes) -> npt.NDArray[np.intp]:
    """The values of the requested keys; 0 for a missing key."""
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0)


@dataclass(frozen=True)
class Curves:
    """The laws of some domains; arrays are [..., domains], losses are in bits per byte.

    Attributes:
        floor, size, data: E, A and B.
        alpha, beta, warm: α, β and T0 (tokens).
    """

    floor: Array
    size: Array
    data: Array
    alpha: float
    beta: float
    warm: float

    def loss(self, parameters: Array | float, tokens: Array | float) -> Array:
        """L̂, [..., domains]; each argument has a value per domain, or one for all."""
        left = self.data / (self.warm + np.asarray(tokens)) ** self.beta
        return np.asarray(self.floor + self.size / np.asarray(parameters) ** self.alpha + left)

    @classmethod
    def alike(cls, domains: int, parameters: float) -> Self:
        """A law that all domains share, in units of B, with Hoffmann's exponents.

        Stand-ins tell neither which expert gains most from more steps nor how much size gains. So A is such that a
        model of that many parameters has the right size for `TOKENS_PER_PARAMETER`: N and T gain as much there.
        """
        alpha, beta = EXPONENTS
        size = beta * parameters**alpha / (alpha * (TOKENS_PER_PARAMETER * parameters) ** beta)
        return cls(np.zeros(domains), np.full(domains, size), np.ones(domains), alpha, beta, 0.0)


def fitted(parameters: Array, tokens: Array, losses: Array) -> Curves:
    """The laws that fit some probes best.

    Args:
        parameters, tokens: parameters and tokens of each probe, the same for all domains, [points].
        losses: bits per byte, [domains, points].
    """
    warm = [factor * float(tokens.max()) for factor in WARM]
    tried = [
        refitted((alpha, beta, t0), parameters, tokens, losses) for alpha, beta, t0 in product(ALPHAS, BETAS, warm)
    ]
    return min(tried, key=lambda curves: _error(curves, parameters, tokens, losses))


def refitted(law: tuple[float, float, float], parameters: Array, tokens: Array, losses: Array) -> Curves:
    """Fit E, A and B for given (α, β, T0); `losses` may have more leading axes, as in a bootstrap."""
    alpha, beta, warm = law
    columns = np.stack([np.ones_like(tokens), parameters**-alpha, (warm + tokens) ** -beta], axis=1)  # [points, 3]
    scale = columns.mean(axis=0)
    terms = _non_negative(columns / scale, losses) / scale
    return Curves(terms[..., 0], terms[..., 1], terms[..., 2], alpha, beta, warm)


def _non_negative(columns: Array, losses: Array) -> Array:
    """Non-negative least squares, [..., 3]: the best fit over all subsets of coefficients that are not 0."""
    best = np.zeros((*losses.shape[:-1], 3))
    error = np.full(losses.shape[:-1], np.inf)
    for subset in SUBSETS:
        terms = np.zeros_like(best)
        terms[..., subset] = losses @ np.linalg.pinv(columns[:, subset]).T
        missed = ((terms @ columns.T - losses) ** 2).sum(axis=-1)
        better: npt.NDArray[np.bool_] = (terms >= 0).all(axis=-1) & (missed < error)
        best, error = np.where(better[..., None], terms, best), np.where(better, missed, error)
    return best


def _error(curves: Curves, parameters: Array, tokens: Array, losses: Array) -> float:
    found = np.stack([curves.loss(size, count) for size, count in zip(parameters, tokens)], axis=-1)
    return float(((found - losses) ** 2).sum())


@dataclass(frozen=True)
class Choice:
    """The menu that is compared: sizes S, M and L, and three step counts.

    Attributes:
        parameters: number of parameters of each size, [3].
        flops: FLOPs per token of each size, [3].
        tokens: tokens of each step count, [3].
    """

    parameters: Array
    flops: Array
    tokens: Array


@dataclass(frozen=True)
class Gain:
    """Gain in bits per byte per FLOP, times the domain's weight.

    Attributes:
        value: the estimate, [domains].
        draws: the same in each bootstrap draw, [draws, domains].
    """

    value: Array
    draws: Array

    @property
    def interval(self) -> Array:
        """Lower and upper end of the interval, [2, domains]."""
        return np.asarray(np.percentile(self.draws, INTERVAL, axis=0))


@dataclass(frozen=True)
class Difficulty:
    """What is known about the domains before training on them; `loss` is z0, bits per byte, [domains]."""

    curves: Curves
    loss: Array
    size: Gain
    step: Gain

    def of_stand_ins(self, choice: Choice) -> Difficulty:
        """Return a copy for losses that were measured with stand-in models: they rank domains, and allocate nothing."""
        return replace(self, curves=Curves.alike(len(self.loss), float(choice.flops[1]) / FLOPS_PER_PARAMETER))


def estimated(probes: Probes, choice: Choice, weights: Array) -> Difficulty:
    """Estimate the difficulty of the domains; `weights` is [domains]. The same arguments give the same result."""
    means = probes.losses.mean(axis=-1)
    curves = fitted(probes.parameters, probes.tokens, means)
    law = (curves.alpha, curves.beta, curves.warm)
    rows = probes.losses.shape[-1]
    picks = np.random.default_rng(0).integers(0, rows, (DRAWS, rows))
    drawn = probes.losses[..., picks].mean(axis=-1)  # [domains, points, draws]
    again = refitted(law, probes.parameters, probes.tokens, np.moveaxis(drawn, -1, 0))
    size, step = (Gain(gain(curves, choice, weights), gain(again, choice, weights)) for gain in (size_gain, step_gain))
    first = np.lexsort((-probes.tokens, probes.parameters))[0]
    return Difficulty(curves, means[:, first], size, step)


def size_gain(curves: Curves, choice: Choice, weights: Array) -> Array:
    """u_size, [..., domains]: gain from the largest model over the smallest, at the middle number of tokens."""
    small, large, tokens = choice.parameters[0], choice.parameters[-1], choice.tokens[1]
    gained = curves.loss(small, tokens) - curves.loss(large, tokens)
    return np.asarray(weights * gained / ((choice.flops[-1] - choice.flops[0]) * tokens))


def step_gain(curves: Curves, choice: Choice, weights: Array) -> Array:
    """u_step, [..., domains]: gain from the greatest number of tokens over the middle one, at the middle size."""
    middle, most = choice.tokens[1], choice.tokens[-1]
    gained = curves.loss(choice.parameters[1], middle) - curves.loss(choice.parameters[1], most)
    return np.asarray(weights * gained / ((most - middle) * choice.flops[1]))


def classes(gain: Array, loss: Array, given: Classes) -> Classes:
    """Classes, [domains]: the third with the highest gain is HARD; as many, with the lowest, are EASY.

    Args:
        given: classes set by hand, which count towards these thirds, or ESTIMATED, [domains].
    """
    third = len(gain) // 3
    ranked = [domain for domain in np.lexsort((-loss, -gain)) if given[domain] == ESTIMATED]
    hard, easy = (max(0, third - int((given == kind).sum())) for kind in (HARD, EASY))
    found = np.where(given == ESTIMATED, MEDIUM, given)
    found[ranked[:hard]] = HARD
    left = ranked[hard:]
    found[left[max(0, len(left) - easy) :]] = EASY
    return found


def steadiness(gain: Gain, loss: Array, given: Classes) -> Array:
    """Fraction of the bootstrap draws in which a domain stays in its class, [domains]."""
    usual = classes(gain.value, loss, given)
    return np.asarray(np.mean([classes(draw, loss, given) == usual for draw in gain.draws], axis=0))
