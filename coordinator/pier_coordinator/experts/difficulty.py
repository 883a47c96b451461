"""Difficulty of domains: where extra size pays and where extra steps pay. A high loss alone is no reason for either.

u_size(j) = v_j (L_S - L_L) / ((F_L - F_S) T)   and   u_step(j) = v_j (L(T) - L(T')) / ((T' - T) F_M)

Losses are predicted. The loss of the smallest model, z0, only breaks ties. Intervals come from a bootstrap over the
scored rows. HDEE (arXiv 2502.19385) sets difficulty by hand; this estimate is not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pier_coordinator.experts.curves import Curves, fitted, refitted
from pier_coordinator.experts.problem import Array

DRAWS = 200
"""Number of bootstrap draws."""
INTERVAL = (2.5, 97.5)
"""Percentiles that bound an interval."""
EASY, MEDIUM, HARD = 0, 1, 2

Classes = npt.NDArray[np.intp]


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

    @property
    def tells(self) -> bool:
        """Whether domains differ: some intervals do not overlap."""
        low, high = self.interval
        return bool(low.max() > high.min())


@dataclass(frozen=True)
class Difficulty:
    """What is known about the domains before training on them; `loss` is z0, bits per byte, [domains]."""

    curves: Curves
    loss: Array
    size: Gain
    step: Gain

    @property
    def tells(self) -> bool:
        """Whether domains differ in either gain; otherwise all are treated alike."""
        return self.size.tells or self.step.tells

    def of_stand_ins(self, choice: Choice) -> Difficulty:
        """Return a copy for losses that were measured with stand-in models: see `Curves.balanced`."""
        return replace(self, curves=self.curves.balanced(float(choice.parameters[1]), float(choice.tokens[1])))


def estimated(probes: Probes, choice: Choice, weights: Array, seed: int = 0) -> Difficulty:
    """Estimate the difficulty of the domains; `weights` is [domains]. The same arguments give the same result."""
    means = probes.losses.mean(axis=-1)
    curves = fitted(probes.parameters, probes.tokens, means)
    law = (curves.alpha, curves.beta, curves.warm)
    rows = probes.losses.shape[-1]
    picks = np.random.default_rng(seed).integers(0, rows, (DRAWS, rows))
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


def classes(gain: Array, loss: Array) -> Classes:
    """Classes, [domains]: the third with the highest gain is HARD; as many, with the lowest, are EASY."""
    third = len(gain) // 3
    ranked = np.lexsort((-loss, -gain))
    found = np.full(len(gain), MEDIUM)
    found[ranked[:third]], found[ranked[len(gain) - third :]] = HARD, EASY
    return found


def steadiness(gain: Gain, loss: Array) -> Array:
    """Fraction of the bootstrap draws in which a domain stays in its class, [domains]."""
    usual = classes(gain.value, loss)
    return np.asarray(np.mean([classes(draw, loss) == usual for draw in gain.draws], axis=0))
