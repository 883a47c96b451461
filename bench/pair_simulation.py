"""All sites of a NoLoCo run in one process: Pier's own pairing and step, an anchor and a momentum at each site.

Sites part after the start with the same weights and AdamW's moments, as those that join a run do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bench.simulation import Simulation, Trainer
from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.mean import relative_weights, weighted_mean
from pier_node.outer.noloco import groups, needs_anchors, noloco_step
from pier_node.outer.schedule import Kind, RoundPlan


class PairSimulation(Simulation):
    """The rounds of a run in pairs. Its loss is the mean of the sites' losses.

    Attributes:
        spreads: standard deviation between the sites' anchors after each round in pairs.
    """

    def __init__(self, config: RunConfig, cache: Path) -> None:
        super().__init__(config, cache)
        self._names = [f"{slot:016x}" for slot in range(config.run.sites)]
        self._anchors: list[Vector] = []
        self._momenta: list[Vector] = []
        self.spreads: list[float] = []

    def loss(self) -> float:
        """Mean validation loss of the sites' anchors, nats per token."""
        return float(np.mean([self._loss_of(anchor) for anchor in self._anchors or [self.anchor]]))

    def merged_loss(self) -> float:
        """Validation loss of the mean of all anchors: what `final_merge` makes."""
        return self._loss_of(np.mean(self._anchors, axis=0, dtype=np.float32))

    def _loss_of(self, weights: Vector) -> float:
        return self._everybody.replica.evaluate(torch.from_numpy(weights), self._validation)

    def _round(self, plan: RoundPlan) -> None:
        if plan.kind is not Kind.PAIR:
            super()._round(plan)
            return
        if not self._sites:
            self._sites = [self._everybody.part([windows]) for windows in self._windows]
            self._anchors = [self.anchor.copy() for _ in self._sites]
            self._momenta = [np.zeros_like(self.anchor) for _ in self._sites]
        weights = [self._trained(site, anchor, plan) for site, anchor in zip(self._sites, self._anchors, strict=True)]
        for group in groups(self._config.run.seed, plan.round, self._names):
            self._meet([self._names.index(node) for node in group], weights)
        self.spreads.append(float(np.sqrt(np.var(self._anchors, axis=0, dtype=np.float64).mean())))

    def _trained(self, site: Trainer, anchor: Vector, plan: RoundPlan) -> Vector:
        site.load(anchor)
        site.train(plan)
        return site.weights()

    def _meet(self, rows: list[int], weights: list[Vector]) -> None:
        rates = self._config.outer.noloco
        mean_weights = _mean([weights[row] for row in rows])
        both = len(rows) > 1 and needs_anchors(rates)
        mean_anchor = _mean([self._anchors[row] for row in rows]) if both else None
        for row in rows:
            anchor, momentum = np.empty_like(self.anchor), np.empty_like(self.anchor)
            noloco_step(self._anchors[row], self._momenta[row], mean_weights, mean_anchor, rates, anchor, momentum)
            self._anchors[row], self._momenta[row] = anchor, momentum


def simulation_of(config: RunConfig, cache: Path) -> Simulation:
    """The simulation of a run's algorithm."""
    return (PairSimulation if config.outer.algorithm == "noloco" else Simulation)(config, cache)


def _mean(vectors: list[Vector]) -> Vector:
    mean = np.empty_like(vectors[0])
    weighted_mean(vectors, relative_weights([1] * len(vectors)), out=mean)
    return mean
