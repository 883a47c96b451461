"""Several experts as one predictor: p(x_t | x_<t) = Σ_j w_j(t) · p_j(x_t | x_<t), probabilities and not logits.

All experts have one tokenizer; their sizes may differ. Text is followed token by token (`Mixture`, for serving) or
row by row (`score`, for evaluation, each row beginning with the prior): one and the same step does both.
Source: spec/hdee.md section 2.6.

How the weights of a mixture follow the text: log w(t) of the experts, of log w(t-1) and what they gave token t-1.

Four rules of spec/hdee.md section 2.6. In all of them the text enters by p_j(x), expert j's probability of the token
that came, and the prior π is the weights before the first one:

    decay        w_j(t+1) ∝ π_j · (w_j(t) / π_j)^γ · p_j(x_t)    γ = 1: Bayes over all the text; γ = 0: over one token
    fixed-share  q_j ∝ w_j(t) · p_j(x_t);  w_j(t+1) = (1-a) · q_j + a · (1-q_j) / (K-1)
    uniform      w_j(t+1) = π_j

Everything is in float64 and in logarithms: after a thousand tokens weights are as small as e^-3000, and come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
"""Axis 0 is the expert, in all arrays of this package."""

Rule = Callable[[Array, Array, Array], Array]
"""log π [experts, ...], log w(t) and log p(x_t) [experts, ...] -> log w(t+1) [experts, ...]."""

Kind = Literal["decay", "fixed-share", "bayes", "uniform"]

LEAST = -700.0
"""Nats: an expert that gives a token less, or nothing at all, is not out for good. e^-700 is still a float64."""


def log_sum(values: Array) -> Array:
    """log Σ_j exp(values_j) over axis 0, which is taken away; -inf where all are."""
    most = values.max(axis=0)
    shift = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(shift + np.log(np.exp(values - shift).sum(axis=0)))


def normalised(logs: Array) -> Array:
    """The same weights with sum 1, over axis 0."""
    return np.asarray(logs - log_sum(logs))


def decay(gamma: float) -> Rule:
    """What a token said counts γ times less with every token after it. Raises ValueError: γ is not from 0 to 1."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma = {gamma} must be from 0 to 1")

    def step(log_prior: Array, log_weights: Array, log_probs: Array) -> Array:
        return normalised(log_prior + gamma * (log_weights - log_prior) + np.maximum(log_probs, LEAST))

    return step


def fixed_share(share: float) -> Rule:
    """At every token the text changes its domain with probability `share` (Herbster and Warmuth, 1998).

    Raises:
        ValueError: it is not above 0 and below 1.
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
    """The rule of a name; `gamma` is for decay, `share` for fixed-share. Raises ValueError."""
    if kind == "decay":
        return decay(gamma)
    if kind == "fixed-share":
        return fixed_share(share)
    return decay(1.0) if kind == "bayes" else uniform


class Mixture:
    """The state of a mixture that follows one text, or several side by side.

    Attributes:
        log_weights: log w(t) of the token that comes next, [experts, *texts].
    """

    def __init__(self, rule: Rule, prior: Array, texts: tuple[int, ...] = ()) -> None:
        """`prior`: [experts], above 0, with sum 1. Raises ValueError."""
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
        """Go on by a token; `log_probs` is what the experts gave it, [experts, *texts]."""
        self.log_weights = self._rule(self._log_prior, self.log_weights, log_probs)

    def drop(self, expert: int) -> None:
        """Go on without an expert; the others' weights have sum 1 again. Raises ValueError: it is the only one."""
        if len(self.log_weights) == 1:
            raise ValueError("a mixture needs an expert")
        self._log_prior, self.log_weights = (
            normalised(np.delete(logs, expert, axis=0)) for logs in (self._log_prior, self.log_weights)
        )


def mixed(log_weights: Array, log_probs: Array) -> Array:
    """log Σ_j w_j · p_j over axis 0; the two arrays have one shape, or one that broadcasts."""
    return log_sum(log_weights + log_probs)


def follow(rule: Rule, prior: Array, log_probs: Array) -> Array:
    """log w(t) at every token of some rows.

    Args:
        prior: [experts].
        log_probs: what the experts gave the tokens that are there, log p_j(x_t | x_<t), [experts, *rows, tokens].

    Returns:
        [experts, *rows, tokens]; w(1) is the prior, w(t) depends on the tokens before t alone.
    """
    mixture = Mixture(rule, prior, log_probs.shape[1:-1])
    weights = np.empty(log_probs.shape)
    for token in range(log_probs.shape[-1]):
        weights[..., token] = mixture.log_weights
        mixture.observe(log_probs[..., token])
    return weights


def score(rule: Rule, prior: Array, log_probs: Array) -> Array:
    """What the mixture gives the tokens that are there, log p(x_t | x_<t), [*rows, tokens]; see `follow`."""
    return mixed(follow(rule, prior, log_probs), log_probs)


def geometric(log_probs: Array) -> Array:
    """The mean of the experts' log-probabilities: no distribution, a diagnostic that HDEE's code calls simple_avg."""
    return np.asarray(log_probs.mean(axis=0))
