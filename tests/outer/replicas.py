"""Replicas that meet in groups, each a row of many independent coordinates, with the real step and pairing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pier_node.base.shared import Vector
from pier_node.config.run import NolocoSection
from pier_node.outer.mean import weighted_mean
from pier_node.outer.noloco import groups, needs_anchors, noloco_step

ONE = np.float32(1)


def mean_of(vectors: Sequence[Vector]) -> Vector:
    out = np.empty_like(vectors[0])
    weighted_mean(vectors, [ONE] * len(vectors), out=out)
    return out


class Replicas:
    """φ and δ of N replicas; `walk` is what their inner steps add to φ in a round."""

    def __init__(self, anchors: Vector, rates: NolocoSection, size: int = 2, seed: int = 1) -> None:
        self.anchors, self.rates, self.size, self.seed = anchors.copy(), rates, size, seed
        self.momenta = np.zeros_like(anchors)
        self.names = [f"{index:016x}" for index in range(len(anchors))]
        self.round = 0

    def meet(self, weights: Vector) -> None:
        """A round of all, with what each has trained to, [N, coordinates]."""
        self.round += 1
        anchors, momenta = np.empty_like(self.anchors), np.empty_like(self.momenta)
        for group in groups(self.seed, self.round, self.names, self.size):
            rows = [self.names.index(node) for node in group]
            mean_weights = mean_of([weights[row] for row in rows])
            alone = len(rows) == 1 or not needs_anchors(self.rates)
            mean_anchor = None if alone else mean_of([self.anchors[row] for row in rows])
            for row in rows:
                step = self.anchors[row], self.momenta[row], mean_weights, mean_anchor, self.rates
                noloco_step(*step, anchor_out=anchors[row], momentum_out=momenta[row])
        self.anchors, self.momenta = anchors, momenta

    def spread(self) -> float:
        """Variance between the replicas, in the mean over coordinates."""
        return float(self.anchors.var(axis=0, dtype=np.float64).mean())

    def run(self, rounds: int, train: Callable[[Vector], Vector]) -> list[float]:
        """The spread after each round."""
        spreads = []
        for _ in range(rounds):
            self.meet(train(self.anchors))
            spreads.append(self.spread())
        return spreads


def stay(anchors: Vector) -> Vector:
    """Training that does nothing."""
    return anchors
