"""Several experts as one predictor: p(x_t | x_<t) = Σ_j w_j(t) · p_j(x_t | x_<t), in probabilities, not logits.

All experts share one tokenizer; their sizes may differ. The same step follows text token by token (`Mixture`, for
serving) and row by row (`score`, for evaluation, where each row starts from the prior). After HDEE (arXiv 2502.19385).

Four rules update the weights. In each, the text enters through p_j(x_t), expert j's probability of the actual token,
and the prior π is the weight before the first token:

    decay        w_j(t+1) ∝ π_j · (w_j(t) / π_j)^γ · p_j(x_t)    γ = 1: Bayes over all the text; γ = 0: over one token
    fixed-share  q_j ∝ w_j(t) · p_j(x_t);  w_j(t+1) = (1-a) · q_j + a · (1-q_j) / (K-1)
    uniform      w_j(t+1) = π_j

The fourth, bayes, is decay with γ = 1. All computation is in float64 and in logarithms: after a thousand tokens,
weights may be as small as e^-3000 and still recover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
"""Axis 0 is the expert in all arrays of this package."""

Rule = Callable[[Array, Array, Array], Array]
"""log π [experts, ...], log w(t) and log p(x_t) [experts, ...] -> log w(t+1) [experts, ...]."""

Kind = Literal["decay", "fixed-share", "bayes", "uniform"]

LEAST = -700.0
"""Lower limit in nats, so that an expert that gives a token no probability can recover; e^-700 is still a float64."""


def log_sum(values: Array) -> Array:
    """log Σ_j exp(values_j) over axis 0, which is removed; -inf where all values are -inf."""
    most = values.max(axis=0)
    shift = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(shift + np.log(np.exp(values - shift).sum(axis=0)))


def normalised(logs: Array) -> Array:
    """The same weights normalised to sum 1 over axis 0."""
    return np.asarray(logs - log_sum(logs))


def decay(gamma: float) -> Rule:
    """The influence of a token shrinks by the factor γ with every later token.

    Raises ValueError: γ is not from 0 to 1.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma = {gamma} must be from 0 to 1")

    def step(log_prior: Array, log_weights: Array, log_probs: Array) -> Array:
        return normalised(log_prior + gamma * (log_weights - log_prior) + np.maximum(log_probs, LEAST))

    return step


def fixed_share(share: float) -> Rule:
    """At every token, the text changes its domain with probability `share` (Herbster and Warmuth, 1998).

    Raises:
        ValueError: `share` is not above 0 and below 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share = {share} must be above 0 and below 1")

    def step(_log_prior: Array, log_weights: Array, log_probs: Array) -> Array:
        others = len(log_weights) - 1
        found = np.exp(normalised(log_weights + np.maximum(log_probs, LEAST)))
        return np.asarray(np.log((1 - share) * found + share * (1 - found) / others)) if others else log_weights

    return step


def uniform(log_prior: Array, _log_weights: Array, _log_probs: Array) -> Array:
    """The prior, whatever the text."""
    return log_prior


def rule(kind: Kind, gamma: float = 0.98, share: float = 1 / 512) -> Rule:
    """The rule with that name. `gamma` is for decay, `share` for fixed-share. Raises ValueError."""
    if kind == "decay":
        return decay(gamma)
    if kind == "fixed-share":
        return fixed_share(share)
    return decay(1.0) if kind == "bayes" else uniform


class Mixture:
    """The state of a mixture that follows one text, or several in parallel.

    Attributes:
        log_weights: log w(t) for the next token, [experts, *texts].
    """

    def __init__(self, rule: Rule, prior: Array, texts: tuple[int, ...] = ()) -> None:
        """`prior`: [experts], positive, with sum 1. Raises ValueError."""
        if prior.ndim != 1 or not np.all(prior > 0) or abs(prior.sum() - 1) > 1e-6:
            raise ValueError(f"a prior is positive and has sum 1: {prior}")
        self._rule = rule
        spread = np.log(prior, dtype=np.float64).reshape(-1, *[1] * len(texts))
        self._log_prior = np.ascontiguousarray(np.broadcast_to(spread, (len(prior), *texts)))
        self.log_weights = self._log_prior

    def predict(self, log_probs: Array) -> Array:
        """The mixture's distribution of the next token.

        Args:
            log_probs: log p_j of every token, [experts, *texts, vocabulary].

        Returns:
            log p, [*texts, vocabulary].
        """
        return mixed(self.log_weights[..., None], log_probs)

    def observe(self, log_probs: Array) -> None:
        """Advance by one token; `log_probs`: the experts' log-probabilities of it, [experts, *texts]."""
        self.log_weights = self._rule(self._log_prior, self.log_weights, log_probs)

    def follow(self, log_probs: Array) -> Array:
        """Advance by some tokens, and return log w(t) at each of them; both are [experts, *texts, tokens]."""
        weights = np.empty(log_probs.shape)
        for token in range(log_probs.shape[-1]):
            weights[..., token] = self.log_weights
            self.observe(log_probs[..., token])
        return weights

    def drop(self, expert: int) -> None:
        """Remove an expert and renormalise the weights of the others. Raises ValueError: it is the only one."""
        if len(self.log_weights) == 1:
            raise ValueError("a mixture needs an expert")
        self._log_prior, self.log_weights = (
            normalised(np.delete(logs, expert, axis=0)) for logs in (self._log_prior, self.log_weights)
        )


def mixed(log_weights: Array, log_probs: Array) -> Array:
    """log Σ_j w_j · p_j over axis 0, for two arrays that broadcast."""
    return log_sum(log_weights + log_probs)


def follow(rule: Rule, prior: Array, log_probs: Array) -> Array:
    """log w(t) at every token of some rows.

    Args:
        prior: [experts].
        log_probs: the experts' log-probabilities of the actual tokens, log p_j(x_t | x_<t), [experts, *rows, tokens].

    Returns:
        [experts, *rows, tokens]; w(1) is the prior, and w(t) depends only on the tokens before t.
    """
    return Mixture(rule, prior, log_probs.shape[1:-1]).follow(log_probs)


def score(rule: Rule, prior: Array, log_probs: Array) -> Array:
    """The mixture's log-probabilities of the actual tokens, log p(x_t | x_<t), [*rows, tokens]; see `follow`."""
    return mixed(follow(rule, prior, log_probs), log_probs)


def geometric(log_probs: Array) -> Array:
    """Mean of the experts' log-probabilities: not a distribution but a diagnostic, simple_avg in HDEE's code."""
    return np.asarray(log_probs.mean(axis=0))
