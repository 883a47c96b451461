"""All sites of a run in one process: Pier's own schedule, outer step and model, without daemons and without a network.

Synchronous steps are taken once, on the rows of all sites together: every site would take the same one. Sites then
separate with copies of the weights and, after a synchronous start, of AdamW's moments (arXiv 2511.17849). Codecs,
overlap and fragments are those of the node: the same unsent pseudo-gradients, offered and taken at the same times. In
a run of pairs (NoLoCo) each site has an anchor and a momentum of its own, and sends weights.

Sites that are apart are computed in one batch: every parameter is a stack, [sites, ...], and a layer is one batched
product. That takes about three quarters of the time of one site after the other.

What a site sends is counted as the node sends it: both halves of an all-reduce to and from the owners of equal shards,
or what a pair swaps; and the state that a solo start hands to each of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.exchange import decoded, exchanged, sent_bytes
from pier_node.base.shared import Vector
from pier_node.config.run import ModelSection, RunConfig
from pier_node.outer.codec import codec
from pier_node.outer.inner_optimizer import Moments, take_step
from pier_node.outer.layout import Layout
from pier_node.outer.mean import Update, relative_weights, weighted_mean
from pier_node.outer.noloco import groups, needs_anchors, noloco_step
from pier_node.outer.pier import accumulate, outer_step, pseudo_gradient
from pier_node.outer.schedule import Kind, RoundPlan, round_plan, total_rounds
from pier_node.site.error_feedback import UnsentUpdate
from pier_node.trainer.data.corpus import Batch, Windows, open_corpus
from pier_node.trainer.model.decoder import EPSILON, Decoder
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica

VALIDATION_SEQUENCES = 32
FP32 = 4
STATE = 2
"""Vectors of the state that those fetch who join after a solo start: φ and M."""


class Point(NamedTuple):
    """Validation loss, nats per token, of the anchor after `step` inner steps."""

    step: int
    loss: float


class Trainer:
    """One replica of the model, trained on the rows of one site or of several."""

    def __init__(self, config: RunConfig, windows: Sequence[Windows], weights: Vector) -> None:
        self._config, self._windows = config, windows
        self.replica = Replica(config, torch.device("cpu"), workers=1)
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


class Sites:
    """The replicas of all sites, each with its own weights, moments and rows, computed in one batch.

    Args:
        begin: all sites begin with its weights; with its moments too after a synchronous start, and after a solo one
            the site that made it.
    """

    def __init__(self, config: RunConfig, windows: Sequence[Windows], begin: Replica) -> None:
        self._config, self._windows, self._layout = config, windows, begin.layout
        weights, first, second = (torch.empty(begin.layout.length) for _ in range(3))
        begin.store_weights(weights)
        begin.store_moments(first, second)
        self._stacks, self._first, self._second = (self._stacked(flat) for flat in (weights, first, second))
        alone = config.outer.start == "solo"
        self._adam_steps = [0 if alone and site else begin.adam_step for site in range(len(windows))]
        for site, steps in enumerate(self._adam_steps):
            for stack in (*self._first.values(), *self._second.values()) if steps == 0 else ():
                stack[site].zero_()
        self._leaves = {name: stack.detach().requires_grad_() for name, stack in self._stacks.items()}
        for leaf in self._leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        self._sites = [self._parameters(site) for site in range(len(windows))]
        decoder = Decoder(config.model)
        self._rotation = decoder._rotation(torch.zeros(1, config.model.context, 1))

    def load(self, starts: Sequence[Vector]) -> None:
        """Set the weights of all sites, shape [parameters] each; AdamW's moments stay."""
        for site, start in enumerate(starts):
            for name, view in self._layout.views(torch.from_numpy(start)).items():
                self._stacks[name][site].copy_(view)

    def weights(self) -> list[Vector]:
        """A copy of the weights of each site, shape [parameters]."""
        vectors = [np.empty(self._layout.length, dtype=np.float32) for _ in self._windows]
        for site, vector in enumerate(vectors):
            self._layout.store({name: stack[site] for name, stack in self._stacks.items()}, torch.from_numpy(vector))
        return vectors

    def train(self, plan: RoundPlan) -> None:
        """Take the inner steps of a round."""
        size = self._config.inner.batch_size
        for step in range(plan.first_step, plan.first_step + plan.steps):
            batches = [windows.batch(step, size) for windows in self._windows]
            inputs, targets = (torch.from_numpy(np.stack(part)) for part in zip(*batches, strict=True))
            self._gradient(inputs, targets)
            for site, parameters in enumerate(self._sites):
                first, second = ({name: it[site] for name, it in kind.items()} for kind in (self._first, self._second))
                take_step(parameters, Moments(first, second, self._adam_steps[site]), step, self._config.inner)
                self._adam_steps[site] += 1

    def _gradient(self, inputs: Tensor, targets: Tensor) -> None:
        """Leave the gradient of each site's mean loss in its parameters; inputs and targets: [sites, rows, context]."""
        for leaf in self._leaves.values():
            if leaf.grad is not None:
                leaf.grad.zero_()
        logits = logits_of(self._config.model, self._leaves, inputs, self._rotation)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.autograd.backward(loss / targets[0].numel())

    def _stacked(self, flat: Tensor) -> dict[str, Tensor]:
        views = self._layout.views(flat)
        return {name: view.expand(len(self._windows), *view.shape).clone() for name, view in views.items()}

    def _parameters(self, site: int) -> dict[str, nn.Parameter]:
        parameters = {name: nn.Parameter(stack[site]) for name, stack in self._stacks.items()}
        for name, leaf in self._leaves.items():
            parameters[name].grad = None if leaf.grad is None else leaf.grad[site]
        return parameters


def logits_of(
    config: ModelSection, weights: dict[str, Tensor], tokens: Tensor, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """The decoder in its Llama form, [sites, rows, context] token ids -> [sites, rows · context, vocab].

    Args:
        weights: parameters by name, [sites, ...] each.
        rotation: cosines and sines of the positions, [context, head_dim] each.
    """
    sites, rows, context = tokens.shape

    def product(name: str, x: Tensor) -> Tensor:
        return torch.bmm(x, weights[f"{name}.weight"].transpose(1, 2))

    def normed(name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (config.dim,), None, EPSILON) * weights[f"{name}.weight"][:, None]

    def heads(name: str, x: Tensor, count: int, turn: bool) -> Tensor:
        x = product(name, x).view(sites * rows, context, count, -1).transpose(1, 2)
        low, high = x.chunk(2, dim=-1)
        return x * rotation[0] + torch.cat((-high, low), dim=-1) * rotation[1] if turn else x

    table = weights["embedding.weight"]
    first = torch.arange(sites)[:, None, None] * table.shape[1]
    x = functional.embedding((tokens + first).flatten(1), table.flatten(0, 1))  # [sites, rows · context, dim]
    for block in (f"blocks.{index}" for index in range(config.layers)):
        y, shared = normed(f"{block}.attention_norm", x), config.kv_heads
        query = heads(f"{block}.attention.query", y, config.heads, True)
        key, value = (heads(f"{block}.attention.{name}", y, shared, name == "key") for name in ("key", "value"))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=shared != config.heads
        )
        x = x + product(f"{block}.attention.output", mixed.transpose(1, 2).reshape(x.shape))
        y = normed(f"{block}.mlp_norm", x)
        gated = functional.silu(product(f"{block}.mlp.gate", y)) * product(f"{block}.mlp.up", y)
        x = x + product(f"{block}.mlp.down", gated)
    return product("embedding" if config.tie_embeddings else "head", normed("norm", x))


class Simulation:
    """The outer rounds of a run with `config.run.sites` sites.

    A site takes a result as soon as it is there, or at the end of the inner steps that overlap with it: `landing`.

    Args:
        cache: folder for tokens.
        domains: every site trains on its own one of these, of those built in, and the loss is that of all of them.
        landing: with overlap, the fraction of the next inner steps after which a result is there and is taken.
        begin: weights that the run begins with; None: random ones.

    Attributes:
        sent: bytes that a site has sent so far, in the mean over the sites.
    """

    def __init__(
        self,
        config: RunConfig,
        cache: Path,
        domains: Sequence[str] = (),
        landing: float = 1.0,
        begin: Vector | None = None,
    ) -> None:
        sites, context, seed = config.run.sites, config.model.context, config.run.seed
        if domains:
            data = [config.data.model_copy(update={"source": "builtin", "path": name}) for name in domains[:sites]]
            corpora = [open_corpus(each, 0, 1, None, cache) for each in data]
        else:
            corpora = [open_corpus(config.data, slot, sites, None, cache) for slot in range(sites)]
        self._config, self._landing = config, landing
        self._windows = [Windows(corpus, context, seed, f"site-{slot}") for slot, corpus in enumerate(corpora)]
        count = config.inner.eval_batches
        self._validation: list[Batch] = self._windows[0].validation(count, VALIDATION_SEQUENCES)
        if domains:
            parts = [windows.validation(1, count * VALIDATION_SEQUENCES // sites) for windows in self._windows]
            self._validation = [batch for part in parts for batch in part]
        self.anchor: Vector = initial_weights(config.model, seed).numpy() if begin is None else begin
        self._everybody = Trainer(config, self._windows, self.anchor)
        self._apart: Sites | None = None
        self._starts: list[Vector] = []
        self._flight: tuple[RoundPlan, list[Update]] | None = None
        self._codec = codec(config.outer.codec, config.outer.density)
        feedback = len(self.anchor), config.outer.fragments, self._codec.lossy, config.outer.error_decay
        rounded = config.outer.residual == "bf16"
        self._unsent = [UnsentUpdate(*feedback, rounded=rounded) for _ in range(sites)]
        self.momentum = np.zeros_like(self.anchor)
        self.sent = 0.0

    def run(self, every: int, tell: Callable[[int], None]) -> list[Point]:
        """All rounds; losses at multiples of `every` steps and at the end. `tell` hears how many steps were done."""
        curve, last = [], self._config.inner.total_steps
        for number in range(1, total_rounds(self._config) + 1):
            plan = round_plan(self._config, number)
            self._round(plan)
            done = plan.first_step + plan.steps
            if done % every == 0 and done < last and plan.steps:
                curve.append(Point(done, self.loss()))
            tell(plan.steps)
        self._land()
        return [*curve, Point(last, self.loss())]

    def loss(self) -> float:
        """Validation loss of the anchor, nats per token."""
        return self._loss_of(self.anchor)

    def _loss_of(self, weights: Vector) -> float:
        return self._everybody.replica.evaluate(torch.from_numpy(weights), self._validation)

    def _round(self, plan: RoundPlan) -> None:
        if plan.kind is Kind.LOCAL:
            self._train_apart(plan)
        else:
            self._train_together(plan)

    def _train_together(self, plan: RoundPlan) -> None:
        self._everybody.train(plan)
        weights = self._everybody.weights()
        if plan.warmup:
            delta = np.empty_like(weights)
            pseudo_gradient(self.anchor, weights, out=delta)
            accumulate(self.momentum, delta, plan.momentum, out=self.momentum)
        self.anchor = weights
        if plan.kind is Kind.SYNC:
            self.sent += sent_bytes(codec("none"), len(self._windows), len(weights))

    def _sites(self) -> Sites:
        """The sites once they are apart."""
        if self._apart is None:
            self._apart = Sites(self._config, self._windows, self._everybody.replica)
            if self._config.outer.start == "solo":
                self.sent += STATE * FP32 * len(self.anchor) * (1 - 1 / len(self._windows))
        return self._apart

    def _train_apart(self, plan: RoundPlan) -> None:
        starts = self._starts if self._flight else self._beginnings()
        sites = self._sites()
        sites.load(starts)
        early = round(self._landing * plan.steps) if self._flight else plan.steps
        sites.train(replace(plan, steps=early))
        self._land()
        if early < plan.steps:
            starts = self._moved(starts)
            sites.train(replace(plan, first_step=plan.first_step + early, steps=plan.steps - early))
        for weights, start, unsent in zip(sites.weights(), starts, self._unsent, strict=True):
            unsent.learn(start, weights, plan.steps)
        self._starts = self._beginnings()
        self._flight = plan, self._offered(plan)
        if not self._config.outer.overlap:
            self._land()

    def _moved(self, starts: list[Vector]) -> list[Vector]:
        """Sites go on from where the result puts them, with what they have learned since; returns those places."""
        sites, places = self._sites(), self._beginnings()
        weights = sites.weights()
        sites.load([place - (start - now) for place, start, now in zip(places, starts, weights, strict=True)])
        return places

    def _offered(self, plan: RoundPlan) -> list[Update]:
        """What each site sends, once `_starts` are where it goes on."""
        part = plan.span(len(self.anchor))
        return [unsent.offer(part, unsent.tokens[plan.fragment]) for unsent in self._unsent]

    def _anchors(self) -> list[Vector]:
        """The anchor of each site."""
        return [self.anchor] * len(self._unsent)

    def _beginnings(self) -> list[Vector]:
        """Where each site goes on: φ less what no round has taken."""
        anchors = self._anchors()
        starts = [unsent.start(anchor) for unsent, anchor in zip(self._unsent, anchors, strict=True)]
        return [anchor if start is None else start.array for anchor, start in zip(anchors, starts, strict=True)]

    def _land(self) -> None:
        """The round under way, if there is one, ends."""
        if self._flight is None:
            return
        (plan, updates), self._flight = self._flight, None
        self._step(plan, updates)
        for unsent in self._unsent:
            unsent.taken(plan.fragment)

    def _step(self, plan: RoundPlan, updates: list[Update]) -> None:
        """Exchange the updates, and take the outer step."""
        mean, part = exchanged(updates, self._codec), plan.span(len(self.anchor))
        self.sent += sent_bytes(self._codec, len(updates), len(mean))
        anchor, momentum = self.anchor.copy(), self.momentum.copy()
        step = self.anchor[part], self.momentum[part], mean, plan.momentum, plan.lr, anchor[part], momentum[part]
        outer_step(*step)
        self.anchor, self.momentum = anchor, momentum


class PairSimulation(Simulation):
    """The rounds of a run in pairs. Its loss is the mean of the sites' losses.

    Attributes:
        spreads: standard deviation between the sites' anchors after each round in pairs.
    """

    def __init__(self, config: RunConfig, cache: Path, domains: Sequence[str] = (), landing: float = 1.0) -> None:
        super().__init__(config, cache, domains, landing)
        self._names = [f"{slot:016x}" for slot in range(config.run.sites)]
        self._own: list[Vector] = []
        self._momenta: list[Vector] = []
        self.spreads: list[float] = []

    def loss(self) -> float:
        """Mean validation loss of the sites' anchors, nats per token."""
        return float(np.mean([self._loss_of(anchor) for anchor in self._own or [self.anchor]]))

    def merged_loss(self) -> float:
        """Validation loss of the mean of all anchors: what `final_merge` makes."""
        return self._loss_of(np.mean(self._anchors(), axis=0, dtype=np.float32))

    def _round(self, plan: RoundPlan) -> None:
        if plan.kind is Kind.PAIR:
            self._train_apart(plan)
        else:
            super()._round(plan)

    def _anchors(self) -> list[Vector]:
        if not self._own:
            self._own = [self.anchor.copy() for _ in self._windows]
            self._momenta = [np.zeros_like(self.anchor) for _ in self._windows]
        return self._own

    def _offered(self, plan: RoundPlan) -> list[Update]:
        part = plan.span(len(self.anchor))
        places = zip(self._unsent, self._starts, strict=True)
        return [unsent.offer(part, unsent.tokens[plan.fragment], start) for unsent, start in places]

    def _step(self, plan: RoundPlan, updates: list[Update]) -> None:
        for group in groups(self._config.run.seed, plan.round, self._names):
            self._meet([self._names.index(node) for node in group], updates)
        self.spreads.append(float(np.sqrt(np.var(self._own, axis=0, dtype=np.float64).mean())))

    def _meet(self, rows: list[int], updates: list[Update]) -> None:
        rates, alone = self._config.outer.noloco, len(rows) == 1
        both = needs_anchors(rates) and not alone
        anchors = [self._own[row] for row in rows]
        mean_weights = updates[rows[0]].sent() if alone else _mean([decoded(updates[row], self._codec) for row in rows])
        mean_anchor = _mean([decoded(Update(anchor, 1), self._codec) for anchor in anchors]) if both else None
        if not alone:
            self.sent += len(rows) * (1 + both) * self._codec.size(len(self.anchor)) / len(self._windows)
        for row in rows:
            anchor, momentum = np.empty_like(self.anchor), np.empty_like(self.anchor)
            noloco_step(self._own[row], self._momenta[row], mean_weights, mean_anchor, rates, anchor, momentum)
            self._own[row], self._momenta[row] = anchor, momentum


def simulation_of(config: RunConfig, cache: Path, domains: Sequence[str] = (), landing: float = 1.0) -> Simulation:
    """The simulation of a run's algorithm."""
    return (PairSimulation if config.outer.algorithm == "noloco" else Simulation)(config, cache, domains, landing)


def ddp_bytes(config: RunConfig) -> float:
    """What a site sends in synchronous training of the same run: an all-reduce of fp32 gradients at each step."""
    sites = config.run.sites
    return config.inner.total_steps * 2 * FP32 * Layout.of(config.model).length * (1 - 1 / sites)


def _mean(vectors: list[Vector]) -> Vector:
    mean = np.empty_like(vectors[0])
    weighted_mean(vectors, relative_weights([1] * len(vectors)), out=mean)
    return mean
