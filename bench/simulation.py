"""All sites of a run in one process: Pier's own schedule, outer step and model, without daemons and without a network.

Synchronous steps are taken once, on the rows of all sites together: every site would take the same one. Sites then
part with copies of the weights and of AdamW's moments, as they do after a start (arXiv 2511.17849). Codecs,
overlap and fragments are those of the node: the same pending pseudo-gradients, offered and taken at the same times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.exchange import exchanged
from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.codec import codec
from pier_node.outer.pier import accumulate, outer_step, pseudo_gradient
from pier_node.outer.schedule import Kind, RoundPlan, round_plan, total_rounds
from pier_node.outer.update import Update
from pier_node.site.unsent import Pending
from pier_node.trainer.data.corpus import Batch, Windows, open_corpus
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica

VALIDATION_SEQUENCES = 32


class Point(NamedTuple):
    """Validation loss, nats per token, of the anchor after `step` inner steps."""

    step: int
    loss: float


class Trainer:
    """One replica of the model, trained on the rows of one site or of several."""

    def __init__(self, config: RunConfig, windows: Sequence[Windows], weights: Vector) -> None:
        self._config, self._windows = config, windows
        self.replica = Replica(config, torch.device("cpu"), workers=1)
        self.load(weights)

    def part(self, windows: Sequence[Windows]) -> Trainer:
        """A trainer that goes on from this one's weights and moments with other rows."""
        first, second = torch.empty(self.replica.layout.length), torch.empty(self.replica.layout.length)
        self.replica.store_moments(first, second)
        trainer = Trainer(self._config, windows, self.weights())
        trainer.replica.load_moments(first, second, self.replica.adam_step)
        return trainer

    def load(self, weights: Vector) -> None:
        """Set the weights, shape [parameters]; AdamW's moments stay."""
        self.replica.load_weights(torch.from_numpy(weights))

    def weights(self) -> Vector:
        """A copy of the weights, shape [parameters]."""
        flat = np.empty(self.replica.layout.length, dtype=np.float32)
        self.replica.store_weights(torch.from_numpy(flat))
        return flat

    def train(self, plan: RoundPlan) -> None:
        """Take the inner steps of a round."""
        size = self._config.inner.batch_size
        for step in range(plan.first_step, plan.first_step + plan.steps):
            batches = [windows.batch(step, size) for windows in self._windows]
            inputs, targets = (np.concatenate(part) for part in zip(*batches, strict=True))
            self.replica.train(step, (inputs, targets), len(inputs))


class Simulation:
    """The outer rounds of a run with `config.run.sites` sites."""

    def __init__(self, config: RunConfig, cache: Path) -> None:
        sites, context, seed = config.run.sites, config.model.context, config.run.seed
        corpora = [open_corpus(config.data, slot, sites, None, cache) for slot in range(sites)]
        self._config = config
        self._windows = [Windows(corpus, context, seed, f"site-{slot}") for slot, corpus in enumerate(corpora)]
        self._validation: list[Batch] = self._windows[0].validation(config.inner.eval_batches, VALIDATION_SEQUENCES)
        self.anchor: Vector = initial_weights(config.model, seed).numpy()
        self._everybody = Trainer(config, self._windows, self.anchor)
        self._sites: list[Trainer] = []
        self._starts: list[Vector] = []
        self._flight: tuple[RoundPlan, list[Update]] | None = None
        self._codec = codec(config.outer.codec)
        self._pending = [Pending(len(self.anchor), config.outer.fragments, self._codec.lossy) for _ in range(sites)]
        self.momentum = np.zeros_like(self.anchor)

    def run(self, every: int, tell: Callable[[int], None]) -> list[Point]:
        """All rounds; losses at multiples of `every` steps and at the end. `tell` hears how many steps were done."""
        curve, last = [], self._config.inner.total_steps
        for number in range(1, total_rounds(self._config) + 1):
            plan = round_plan(self._config, number)
            self._round(plan)
            done = plan.first_step + plan.steps
            if done % every == 0 and done < last:
                curve.append(Point(done, self.loss()))
            tell(plan.steps)
        self._land()
        return [*curve, Point(last, self.loss())]

    def loss(self) -> float:
        """Validation loss of the anchor, nats per token."""
        return self._everybody.replica.evaluate(torch.from_numpy(self.anchor), self._validation)

    def _round(self, plan: RoundPlan) -> None:
        if plan.kind is Kind.LOCAL:
            self._apart(plan)
        else:
            self._together(plan)

    def _together(self, plan: RoundPlan) -> None:
        self._everybody.train(plan)
        weights = self._everybody.weights()
        if plan.warmup:
            delta = np.empty_like(weights)
            pseudo_gradient(self.anchor, weights, out=delta)
            accumulate(self.momentum, delta, plan.momentum, out=self.momentum)
        self.anchor = weights

    def _apart(self, plan: RoundPlan) -> None:
        if not self._sites:
            self._sites = [self._everybody.part([windows]) for windows in self._windows]
        starts = self._starts if self._flight else self._beginnings()
        for site, start in zip(self._sites, starts, strict=True):
            site.load(start)
            site.train(plan)
        self._land()
        for site, start, pending in zip(self._sites, starts, self._pending, strict=True):
            pending.learn(start, site.weights(), plan.steps)
        part = plan.span(len(self.anchor))
        offers = [(pending.offer(part), pending.tokens[plan.fragment]) for pending in self._pending]
        self._flight = plan, [Update(vector, tokens, error) for (vector, error), tokens in offers]
        self._starts = self._beginnings()
        if not self._config.outer.overlap:
            self._land()

    def _beginnings(self) -> list[Vector]:
        """Where each site goes on: φ less what no round has taken."""
        starts = [pending.start(self.anchor) for pending in self._pending]
        return [self.anchor if start is None else start.array for start in starts]

    def _land(self) -> None:
        """The round under way, if there is one, ends."""
        if self._flight is None:
            return
        (plan, updates), self._flight = self._flight, None
        mean, part = exchanged(updates, self._codec), plan.span(len(self.anchor))
        anchor, momentum = self.anchor.copy(), self.momentum.copy()
        step = self.anchor[part], self.momentum[part], mean, plan.momentum, plan.lr, anchor[part], momentum[part]
        outer_step(*step)
        self.anchor, self.momentum = anchor, momentum
        for pending in self._pending:
            pending.taken(plan.fragment)
