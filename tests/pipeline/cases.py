"""Attempts of sites that hold stages of a tiny model, over a feigned network, and one process that does the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rounds.cases import CALM
from simulation.network import Network, SimCarrier, Weather
from torch import Tensor
from torch.nn import functional

from pier_node.base.faults import NO_FAULTS, Faults
from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.layout import Layout
from pier_node.pipeline.activation_codec import Formats
from pier_node.pipeline.attempt import Attempt, AttemptResult
from pier_node.pipeline.context import Rows, Tools
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.stage import Stage, scatter, stage_blocks
from pier_node.rounds.roster import Roster
from pier_node.rounds.suspects import Suspicion
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.initial import initial_weights
from pier_node.wire.carrier import DROP, TALLY, Chunk
from pier_proto.v1.peer_pb2 import Ack, Dropped, IterationPlan, Path, Phase, Pulse, Site, Total, Worked

CONTEXT, BATCH, SEED = 8, 2, 1
PLAIN = {"activation_codec": "none", "gradient_codec": "none"}
"""Activations travel as they are computed, so that gradients are those of one process."""


def config(
    stages: int = 4, layers: int = 5, form: str = "llama", tied: bool = True, subspace: int = 0, **pipeline: Any
) -> RunConfig:
    model = {"dim": 16, "layers": layers, "heads": 2, "ffn_dim": 32, "vocab_size": 32, "context": CONTEXT}
    model["subspace"] = subspace
    return RunConfig.model_validate(
        {
            "run": {"sites": max(stages, 2), "seed": SEED},
            "model": {"preset": "llama-tiny", "form": form, "tie_embeddings": tied, **model},
            "inner": {"batch_size": BATCH, "total_steps": 6, "warmup_steps": 1, "precision": "fp32"},
            "pipeline": {"stages": stages, "microbatches": 4, "plan_seconds": 0.01, **PLAIN, **pipeline},
        }
    )


def whole_weights(run: RunConfig) -> Tensor:
    # Larger than those of a run: with the small ones of GPT-2 most gradients are nearly the same.
    return initial_weights(run.model, SEED) * 4


def rows(node: str, step: int, place: int) -> Rows:
    dice = torch.Generator().manual_seed(1000 * step + 10 * place + ord(node[0]))
    tokens = torch.randint(32, (BATCH, CONTEXT + 1), generator=dice)
    return tokens[:, :-1], tokens[:, 1:]


def iteration_plan(
    stages: Sequence[int], paths: Sequence[Sequence[int]], waves: Sequence[int] = (), meet: bool = False
) -> IterationPlan:
    """Of the nodes a, b, c, … that hold these stages; paths are indices."""
    nodes = [chr(ord("a") + index) for index in range(len(stages))]
    routes = [Path(sites=path) for path in paths]
    sizes = waves or [len(paths)] * bool(paths)
    return IterationPlan(round=1, nodes=nodes, stages=stages, paths=routes, waves=sizes, meet=meet)


class Worker:
    """A site that holds a stage, and takes part in one attempt."""

    def __init__(self, network: Network, node: str, run: RunConfig, plan: Plan, faults: Faults = NO_FAULTS) -> None:
        self.node, stage = node, plan.stages[node]
        self.carrier: SimCarrier = network.join(node)
        pulse = Pulse(site=Site(node=node), phase=Phase.PHASE_TRAINING)
        self.roster = Roster(self.carrier, lambda: pulse)
        self.stage = Stage(run, stage, torch.device("cpu"))
        self.stage.load(torch.from_numpy(scatter(run.model, run.pipeline.stages, whole_weights(run).numpy(), stage)))
        self.tools = Tools(
            self.carrier,
            self.roster,
            ThreadPoolExecutor(1),
            lambda step, place: rows(node, step, place),
            run.pipeline.memory,
            Formats.of(run, bf16=False),
            faults,
        )
        self.attempt = Attempt(self.tools, plan, self.stage)
        self.carrier.serve_push(self._take)
        self.carrier.serve(TALLY, self._tally)
        self.carrier.serve(DROP, self._drop)

    async def meet(self, *others: str) -> None:
        for node in others:
            self.roster.add(Site(node=node))
        await self.roster.settled()

    async def _take(self, sender: str, chunks: AsyncIterator[Chunk]) -> None:
        await self.attempt.take(sender, await anext(chunks), chunks)

    async def _tally(self, sender: str, worked: Worked) -> Total:
        return await self.attempt.tally(sender, worked)

    async def _drop(self, sender: str, dropped: Dropped) -> Ack:
        self.attempt.drop(Suspicion(dropped.suspect, dropped.reason))
        return Ack()


async def workers(run: RunConfig, plan: Plan, weather: Weather = CALM, seed: int = 1, **faults: Faults) -> list[Worker]:
    """All sites of a plan, which know each other."""
    network = Network(seed, weather)
    made = [Worker(network, node, run, plan, faults.get(node, NO_FAULTS)) for node in plan.stages]
    await asyncio.gather(*(worker.meet(*plan.stages) for worker in made))
    return made


async def outcomes(made: Sequence[Worker]) -> list[AttemptResult | BaseException]:
    """How the attempt ended at each site."""
    found = await asyncio.gather(*(worker.attempt.run() for worker in made), return_exceptions=True)
    for worker in made:
        await worker.roster.stop()
    return found


async def worths(made: Sequence[Worker]) -> dict[str, AttemptResult]:
    found = await outcomes(made)
    for it in found:
        if isinstance(it, BaseException):
            raise it
    return {worker.node: it for worker, it in zip(made, found, strict=True) if isinstance(it, AttemptResult)}


def reference(run: RunConfig, plan: Plan) -> tuple[dict[int, Vector], float, float]:
    """Mean gradient of each visited stage, its square over all stages, and the mean loss: by one process, whole."""
    layout, stages = Layout.of(run.model), run.pipeline.stages
    model = Decoder(run.model)
    layout.load(model, whole_weights(run))
    blocks = stage_blocks(run.model.layers, stages)
    sums = {stage: torch.zeros(layout.length) for stage in plan.visited}
    visits = dict.fromkeys(plan.visited, 0)
    losses, places = [], dict.fromkeys(plan.stages, 0)
    for way in plan.ways:
        path = way[: len(way) // 2]
        inputs, targets = rows(path[0], plan.message.step, places[path[0]])
        places[path[0]] += 1
        x = model.embed(inputs)
        rotation = model._rotation(x) if run.model.form == "llama" else None
        for node in path:
            for block in blocks[plan.stages[node]]:
                x = model.blocks[str(block)](x, rotation)
        loss = functional.cross_entropy(model.predict(x).flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        flat = torch.zeros(layout.length)
        layout.store({name: it.grad for name, it in model.named_parameters() if it.grad is not None}, flat)
        for node in path:
            sums[plan.stages[node]] += flat
            visits[plan.stages[node]] += 1
    means = {stage: scatter(run.model, stages, (it / visits[stage]).numpy(), stage) for stage, it in sums.items()}
    square = sum(float((mean.astype(float) ** 2).sum()) for mean in means.values())
    return means, square, sum(losses) / len(losses)
