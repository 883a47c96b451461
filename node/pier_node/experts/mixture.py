"""Several experts as one predictor: p(x_t | x_<t) = Σ_j w_j(t) · p_j(x_t | x_<t), probabilities and not logits.

All experts have one tokenizer; their sizes may differ. Text is followed token by token (`Mixture`, for serving) or
row by row (`score`, for evaluation, each row beginning with the prior): one and the same step does both.
Source: spec/hdee.md section 2.6.
"""

from __future__ import annotations

import numpy as np

from pier_node.experts.weights import Array, Rule, log_sum, normalised


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
