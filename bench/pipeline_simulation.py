"""All stages of a pipelined run in one process: the executor's own planner, stages and steps, without a network.

Where replicas of a stage average at every step they hold the same bits, so one of each is enough here. A stage's
gradient is the mean over the microbatches that came to it, clipped by the norm over all stages; one that nobody visited
is not stepped (arXiv 2502.19913). A step's windows depend on nothing but seed and step, so that all paths see the same
ones. Replicas that step apart meet every H steps, and what they bring is encoded as it would be on its way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bench.exchange import exchanged
from bench.pipeline_arms import FullAt
from bench.simulation import VALIDATION_SEQUENCES, Point
from pier_node.base.shared import SharedVector, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.mean import Update
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline.activation_codec import Formats, TensorFormat
from pier_node.pipeline.beginnings import made
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import square
from pier_node.pipeline.outer_step import step_of
from pier_node.pipeline.planner import Planner
from pier_node.pipeline.planning.search import search
from pier_node.pipeline.stage import Stage, gather
from pier_node.pipeline.stage_step import NAMES, clip, take_stage_step
from pier_node.pipeline.vote_state import VoteState
from pier_node.trainer.data.corpus import Batch, Windows, open_corpus
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.evaluate import validation_loss
from pier_proto.v1.peer_pb2 import Place, Pulse, Site

if TYPE_CHECKING:
    from pier_node.pipeline.planning import plan as paths
    from pier_node.pipeline.planning.problem import Problem

CPU = torch.device("cpu")
VERSION = 1 << 24
"""Of all stages, for the planner: what it is does not matter here, as long as it is the one that counts."""


class Routes:
    """The paths of each iteration, as the planner of a run of equally fast sites gives them.

    Attributes:
        stages: the stage of each place: of each site if replicas step apart, otherwise of each stage.
    """

    def __init__(self, config: RunConfig, full_at: FullAt | None = None) -> None:
        section, self._full_at, self._total = config.pipeline, full_at, config.inner.total_steps
        self._planner, self._full = (
            Planner(section, config.run.seed, full_from, lambda *_: None, _searched)
            for full_from in (config.full_from, 0)
        )
        self._apart, stages = config.outer.algorithm != "sync", section.stages
        strangers = {f"{site:03}": Pulse(site=Site(node=f"{site:03}")) for site in range(config.run.sites)}
        dealt = asyncio.run(self._planner.plan(1, VoteState(0, 0.0, (0,) * stages), strangers, {}))
        self._pulses = {
            node: Pulse(site=Site(node=node), place=Place(stage=stage, version=VERSION, memory=section.memory))
            for node, stage in zip(dealt.nodes, dealt.stages, strict=True)
        }
        self._section, self._nodes = section, sorted(self._pulses)
        self.stages = [self._pulses[it].place.stage for it in self._nodes] if self._apart else [*range(stages)]

    def of(self, step: int) -> list[tuple[int, ...]]:
        """The places that each microbatch visits, in their order."""
        voted = VoteState(step, 0.0, (VERSION,) * self._section.stages)
        planner = self._full if self._full_at and self._full_at(step, self._total) else self._planner
        message = asyncio.run(planner.plan(2 + step, voted, self._pulses, {}))
        plan = Plan.read(message, self._section.stages)
        place = self._nodes.index if self._apart else plan.stages.__getitem__
        return [tuple(place(node) for node in way[: len(way) // 2]) for way in plan.ways]


@dataclass
class Held:
    """A stage, and what a site keeps of it.

    Attributes:
        tensors: NAMES.
        base: the stage after the last outer step.
        microbatches: that it has seen since.
        residual: what the codec dropped of what it brought then, and of the mean.
    """

    stage: Stage
    tensors: dict[str, Vector]
    base: OuterState
    adam_steps: int = 0
    microbatches: int = 0
    residual: Vector | None = None


class PipelineSimulation:
    """A run of `config.run.sites` sites.

    Args:
        full_at: steps in which all microbatches visit all stages, besides those that `pipeline.full_end` makes so.

    Attributes:
        visits: how often each order of stages was taken.
        validation: windows, the same for all runs.
    """

    def __init__(self, config: RunConfig, cache: Path, full_at: FullAt | None = None) -> None:
        self._config, self._routes = config, Routes(config, full_at)
        self._windows = Windows(open_corpus(config.data, 0, 1, None, cache), config.model.context, config.run.seed, "")
        batches = self._windows.validation(config.inner.eval_batches, VALIDATION_SEQUENCES)
        self.validation: list[Batch] = batches
        self._held = [_held(config, stage) for stage in self._routes.stages]
        self._formats = Formats.of(config, bf16=False)
        self.visits: dict[tuple[int, ...], int] = {}

    def run(self, every: int, tell: Callable[[int], None]) -> list[Point]:
        """All steps; losses of the whole model at multiples of `every` and at the end."""
        curve, last = [], self._config.inner.total_steps
        for step in range(last):
            self.step(step, self._routes.of(step))
            if self._config.outer.algorithm != "sync" and (step + 1) % self._config.outer.inner_steps == 0:
                self.meet((step + 1) / last)
            if (step + 1) % every == 0 or step + 1 == last:
                curve.append(Point(step + 1, validation_loss(self.model(), self.validation, bf16=False)))
            tell(1)
        return curve

    def step(self, number: int, routes: list[tuple[int, ...]]) -> float:
        """An iteration over microbatches that take these ways through places; its mean loss."""
        seen = [sum(place in route for route in routes) for place in range(len(self._held))]
        for place, held in enumerate(self._held):
            held.stage.begin([it for it, route in enumerate(routes) if place in route])
        loss = sum(self._microbatch(number, it, route) for it, route in enumerate(routes)) / len(routes)
        gradients: dict[int, Vector] = {}
        for place, count in enumerate(seen):
            if count:
                gradients[place] = np.empty(self._held[place].stage.layout.length, np.float32)
                self._held[place].stage.mean_gradient(torch.from_numpy(gradients[place]))
        total = self._square(gradients, seen)
        for place, gradient in gradients.items():
            held = self._held[place]
            layout, tensors = held.stage.layout, held.tensors
            clipped = clip(self._config.inner, gradient, total).array
            take_stage_step(self._config.inner, layout, tensors, held.adam_steps, clipped, number)
            held.adam_steps += 1
            held.microbatches += seen[place]
            held.stage.load(torch.from_numpy(tensors[ANCHOR]))
        return loss

    def meet(self, done: float) -> None:
        """The outer step of every stage, after the part `done` of the run."""
        step = step_of(self._config.outer, done)
        for stage in range(self._config.pipeline.stages):
            replicas = [held for held in self._held if held.stage.stage == stage]
            brought = [step.brought(it.base.anchor, it.tensors[ANCHOR], it.microbatches) for it in replicas]
            errors = [np.zeros(len(it) - 1, np.float32) for it in brought]
            updates = [
                Update(vector[:-1], 1, error, held.residual)
                for held, vector, error in zip(replicas, brought, errors, strict=True)
            ]
            microbatches = np.float32(np.mean([vector[-1] for vector in brought]))
            tensors = step.after(replicas[0].base, np.append(exchanged(updates, step.codec), microbatches))
            for held, error in zip(replicas, errors, strict=True):
                held.base, held.microbatches, held.residual = OuterState(0, (), tensors, {}), 0, error
                held.tensors[ANCHOR][:] = held.base.anchor
                held.stage.load(torch.from_numpy(held.tensors[ANCHOR]))

    def _square(self, gradients: dict[int, Vector], seen: list[int]) -> float:
        """Square of the norm over all stages; of a stage's replicas, their mean, weighted by what each has seen."""
        sums: dict[int, tuple[float, int]] = {}
        for place, gradient in gradients.items():
            whole, count = sums.get(stage := self._held[place].stage.stage, (0.0, 0))
            sums[stage] = whole + seen[place] * square(gradient), count + seen[place]
        return sum(whole / count for whole, count in sums.values())

    def weights(self) -> Vector:
        """Of the whole model after an outer step, shape [parameters]."""
        config = self._config
        whole = np.empty(Layout.of(config.model).length, np.float32)
        parts = {held.stage.stage: held.tensors[ANCHOR] for held in self._held}
        gather(config.model, config.pipeline.stages, parts, whole)
        return whole

    def model(self) -> Decoder:
        """The whole model, as `export` joins it."""
        model = Decoder(self._config.model)
        Layout.of(self._config.model).load(model, torch.from_numpy(self.weights()))
        return model

    def _microbatch(self, step: int, number: int, route: tuple[int, ...]) -> float:
        size = self._config.inner.batch_size
        inputs, targets = map(torch.from_numpy, self._windows.rows(step, number * size, size))
        first, *later = (self._held[place].stage for place in route)
        stages = tuple(it.stage for it in (first, *later))
        self.visits[stages] = self.visits.get(stages, 0) + 1
        forms = self._formats
        x = _sent(forms.activations, first.embed(number, inputs))
        for stage in later:
            x = _sent(forms.activations, stage.forward(number, x))
        loss, gradient = first.loss(number, x, targets)
        for stage in reversed(later):
            back = stage.backward(number, _sent(forms.gradients, gradient))
            assert back is not None
            gradient = back
        first.backward(number, _sent(forms.gradients, gradient))
        return loss


def _sent(form: TensorFormat, tensor: Tensor) -> Tensor:
    """A tensor as the next stage gets it."""
    return torch.from_numpy(form.decode(form.encode(tensor.numpy())))


def _held(config: RunConfig, stage: int) -> Held:
    held, weights = Stage(config, stage, CPU), made(config, stage)
    held.load(torch.from_numpy(weights))
    begin = {name: SharedVector(len(weights)) for name in (ANCHOR, MOMENTUM)}
    begin[ANCHOR].array[:] = weights
    tensors = {name: weights if name == ANCHOR else np.zeros_like(weights) for name in NAMES}
    return Held(held, tensors, OuterState(0, (), begin, {}))


async def _searched(problem: Problem, seed: int, seconds: float, current: paths.Plan, stay: bool) -> paths.Plan:
    """To its end, however busy the machine is, so that a seed gives the same paths."""
    return search(problem, seed, seconds, current if stay else None, deadline=math.inf).plan
