"""Where extra size, and where extra steps pay: two questions, and neither is how high a domain's loss is.

u_size(j) = v_j (L_S - L_L) / ((F_L - F_S) T)   and   u_step(j) = v_j (L(T) - L(T')) / ((T' - T) F_M)

with predicted losses; the loss of the smallest model, z0, breaks ties and nothing else. Intervals are of a bootstrap
over the rows that were scored. Source: spec/hdee.md section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pier_coordinator.experts.curves import Curves, fitted, refitted
from pier_coordinator.experts.problem import Array

DRAWS = 200
"""Of the bootstrap."""
INTERVAL = (2.5, 97.5)
"""Percentiles."""
EASY, MEDIUM, HARD = 0, 1, 2

Classes = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Probes:
    """Losses of short probes.

    Attributes:
        parameters, tokens: of each probe, [points].
        losses: bits per byte of each row that was scored, [domains, points, rows]; the same rows at all points.
    """

    parameters: Array
    tokens: Array
    losses: Array


@dataclass(frozen=True)
class Choice:
    """What is compared: sizes S, M, L and step counts of a menu.

    Attributes:
        parameters, flops: of the sizes (FLOPs per token), [3].
        tokens: of the step counts, [3].
    """

    parameters: Array
    flops: Array
    tokens: Array


@dataclass(frozen=True)
class Gain:
    """Bits per byte that a FLOP brings, times the domain's weight: [domains], and in the draws of a bootstrap."""

    value: Array
    draws: Array

    @property
    def interval(self) -> Array:
        """From and to, [2, domains]."""
        return np.asarray(np.percentile(self.draws, INTERVAL, axis=0))

    @property
    def tells(self) -> bool:
        """Whether domains differ: some intervals have nothing in common."""
        low, high = self.interval
        return bool(low.max() > high.min())


@dataclass(frozen=True)
class Difficulty:
    """What is known of the domains before they are trained on; `loss` is z0, bits per byte, [domains]."""

    curves: Curves
    loss: Array
    size: Gain
    step: Gain

    @property
    def tells(self) -> bool:
        """Whether domains differ in anything that matters; else all are treated alike."""
        return self.size.tells or self.step.tells

    def of_stand_ins(self, choice: Choice) -> Difficulty:
        """The same, measured with models that only stand in for the real ones: see `Curves.balanced`."""
        return replace(self, curves=self.curves.balanced(float(choice.parameters[1]), float(choice.tokens[1])))


def estimated(probes: Probes, choice: Choice, weights: Array, seed: int = 0) -> Difficulty:
    """Difficulty of the domains; `weights` [domains]. The same arguments give the same answer."""
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
    """u_size, [..., domains]: the largest model instead of the smallest, for the middle number of tokens."""
    small, large, tokens = choice.parameters[0], choice.parameters[-1], choice.tokens[1]
    gained = curves.loss(small, tokens) - curves.loss(large, tokens)
    return np.asarray(weights * gained / ((choice.flops[-1] - choice.flops[0]) * tokens))


def step_gain(curves: Curves, choice: Choice, weights: Array) -> Array:
    """u_step, [..., domains]: the most tokens instead of the middle number, for the middle size."""
    middle, most = choice.tokens[1], choice.tokens[-1]
    gained = curves.loss(choice.parameters[1], middle) - curves.loss(choice.parameters[1], most)
    return np.asarray(weights * gained / ((most - middle) * choice.flops[1]))


def classes(gain: Array, loss: Array) -> Classes:
    """The third where it pays most is HARD, the third where it pays least is EASY, as many as these; [domains]."""
    third = len(gain) // 3
    ranked = np.lexsort((-loss, -gain))
    found = np.full(len(gain), MEDIUM)
    found[ranked[:third]], found[ranked[len(gain) - third :]] = HARD, EASY
    return found


def steadiness(gain: Gain, loss: Array) -> Array:
    """In which fraction of the bootstrap's draws a domain is in the class in which it is, [domains]."""
    usual = classes(gain.value, loss)
    return np.asarray(np.mean([classes(draw, loss) == usual for draw in gain.draws], axis=0))
