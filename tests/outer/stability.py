"""How far replicas drift apart under NoLoCo, derived from its outer step (arXiv 2506.10911, Eq. 2).

X, C, Y are the means over replicas of φ̃², φ̃δ̃ and δ̃², where ~ is the deviation from the mean over all replicas. Without
gradients, with groups of n drawn at random among N sites in every round and q = ((n − 1)/n)·(N/(N − 1)):

    Y' = α²Y − 2αγq·C + γ²q·X;   C' = αC − γq·X + Y';   X' = X + 2αC − 2γq·X + Y'
"""

from __future__ import annotations

import math

import numpy as np


def mixing(size: int = 2, sites: float = math.inf) -> float:
    """q: the part of the replicas' variance that lies within a group of `size`, times N / (N − 1)."""
    others = 1.0 if math.isinf(sites) else sites / (sites - 1)
    return (size - 1) / size * others


def gamma_limit(alpha: float, size: int = 2, sites: float = math.inf) -> float:
    """The γ at and above which the spread of the replicas grows without limit."""
    return 2 * (1 - alpha**2) / (1 + alpha * (1 - 2 * mixing(size, sites)))


def recursion(alpha: float, gamma: float, size: int = 2, sites: float = math.inf) -> list[list[float]]:
    """The matrix that maps (X, C, Y) to the next round."""
    q = mixing(size, sites)
    delta = [gamma**2 * q, -2 * alpha * gamma * q, alpha**2]
    cross = [-gamma * q + delta[0], alpha + delta[1], delta[2]]
    anchor = [1 - 2 * gamma * q + delta[0], 2 * alpha + delta[1], delta[2]]
    return [anchor, cross, delta]


def contraction(alpha: float, gamma: float, size: int = 2, sites: float = math.inf) -> float:
    """The factor by which the replicas' variance changes per round in the long run, without gradients."""
    return float(np.abs(np.linalg.eigvals(recursion(alpha, gamma, size, sites))).max())


def stationary_spread(alpha: float, beta: float, gamma: float, size: int = 2, sites: float = math.inf) -> float:
    """X∞ / s²: the replicas' final variance if each Δ carries noise of variance s² and the loss is flat."""
    q = mixing(size, sites)
    pull = 2 * (1 - alpha) - gamma * (1 + alpha - 2 * alpha * q) / (1 + alpha)
    return beta**2 * (1 / size - 1 / sites) / (gamma * q * pull)
