"""All stages of a pipelined run in one process: the executor's own planner, stages and step, without a network.

Replicas of a stage hold the same bits, so one of each is enough here. A stage's gradient is the mean over the
microbatches that came to it, clipped by the norm over all stages; one that nobody visited is not stepped
(arXiv 2502.19913). A step's windows depend on nothing but seed and step, so that all paths see the same ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.simulation import VALIDATION_SEQUENCES, Point
from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.outer.state import ANCHOR
from pier_node.pipeline.activation_codec import Formats, TensorFormat
from pier_node.pipeline.beginnings import made
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import square
from pier_node.pipeline.planner import Planner
from pier_node.pipeline.planning.search import search
from pier_node.pipeline.stage import Stage, gather
from pier_node.pipeline.stage_state import NAMES, take_stage_step
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
    """The paths of each iteration, as the planner of a run of equally fast sites gives them."""

    def __init__(self, config: RunConfig) -> None:
        section = config.pipeline
        self._planner = Planner(section, config.run.seed, config.full_from, lambda *_: None, _searched)
        self._stages = section.stages
        strangers = {f"{site:03}": Pulse(site=Site(node=f"{site:03}")) for site in range(config.run.sites)}
        dealt = asyncio.run(self._planner.plan(1, VoteState(0, 0.0, (0,) * section.stages), strangers, {}))
        self._pulses = {
            node: Pulse(site=Site(node=node), place=Place(stage=stage, version=VERSION, memory=section.memory))
            for node, stage in zip(dealt.nodes, dealt.stages, strict=True)
        }

    def of(self, step: int) -> list[tuple[int, ...]]:
        """The stages that each microbatch visits, in their order."""
        voted = VoteState(step, 0.0, (VERSION,) * self._stages)
        message = asyncio.run(self._planner.plan(2 + step, voted, self._pulses, {}))
        plan = Plan.read(message, self._stages)
        return [tuple(plan.stages[node] for node in way[: len(way) // 2]) for way in plan.ways]


class Held(NamedTuple):
    """A stage, and what a site keeps of it: `tensors` are NAMES."""

    stage: Stage
    tensors: dict[str, Vector]


class PipelineSimulation:
    """A run of `config.run.sites` sites.

    Args:
        full: in which steps all microbatches visit all stages.

    Attributes:
        visits: how often each order of stages was taken.
        validation: windows, the same for all runs.
    """

    def __init__(self, config: RunConfig, cache: Path) -> None:
        self._config, self._routes = config, Routes(config)
        self._windows = Windows(open_corpus(config.data, 0, 1, None, cache), config.model.context, config.run.seed, "")
        batches = self._windows.validation(config.inner.eval_batches, VALIDATION_SEQUENCES)
        self.validation: list[Batch] = batches
        self._held = [_held(config, stage) for stage in range(config.pipeline.stages)]
        self._adam_steps = [0] * len(self._held)
        self._formats = Formats.of(config, bf16=False)
        self.visits: dict[tuple[int, ...], int] = {}

    def run(self, every: int, tell: Callable[[int], None]) -> list[Point]:
        """All steps; losses of the whole model at multiples of `every` and at the end."""
        curve, last = [], self._config.inner.total_steps
        for step in range(last):
            self.step(step, self._routes.of(step))
            if (step + 1) % every == 0 or step + 1 == last:
                curve.append(Point(step + 1, validation_loss(self.model(), self.validation, bf16=False)))
            tell(1)
        return curve

    def step(self, number: int, routes: list[tuple[int, ...]]) -> float:
        """An iteration over microbatches that take these ways; its mean loss."""
        for index, held in enumerate(self._held):
            held.stage.begin([it for it, route in enumerate(routes) if index in route])
        loss = sum(self._microbatch(number, it, route) for it, route in enumerate(routes)) / len(routes)
        gradients: dict[int, Vector] = {}
        for index in sorted({stage for route in routes for stage in route}):
            gradients[index] = np.empty(self._held[index].stage.layout.length, np.float32)
            self._held[index].stage.mean_gradient(torch.from_numpy(gradients[index]))
        total = sum(map(square, gradients.values()))
        for index, gradient in gradients.items():
            stage, tensors = self._held[index]
            take_stage_step(self._config.inner, stage.layout, tensors, self._adam_steps[index], gradient, total, number)
            self._adam_steps[index] += 1
            stage.load(torch.from_numpy(tensors[ANCHOR]))
        return loss

    def weights(self) -> Vector:
        """Of the whole model, shape [parameters]."""
        config = self._config
        whole = np.empty(Layout.of(config.model).length, np.float32)
        parts = {index: held.tensors[ANCHOR] for index, held in enumerate(self._held)}
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
        self.visits[route] = self.visits.get(route, 0) + 1
        first, *later = (self._held[index].stage for index in route)
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
    return Held(held, {name: weights if name == ANCHOR else np.zeros_like(weights) for name in NAMES})


async def _searched(problem: Problem, seed: int, seconds: float, current: paths.Plan, stay: bool) -> paths.Plan:
    """To its end, however busy the machine is, so that a seed gives the same paths."""
    return search(problem, seed, seconds, current if stay else None, deadline=math.inf).plan
