"""A pipelined run of several sites in virtual time: all but the network is real."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pipeline.cases import rows
from rounds.cases import CALM, nonces
from simulation.cluster import Disk
from simulation.network import Network, SimCarrier, Weather
from simulation.statements import PlainStatements
from simulation.virtual_time import Hanging

from pier_node.base.faults import Faults
from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.mean import Weighing
from pier_node.outer.state import OuterState
from pier_node.pipeline import vote_state
from pier_node.pipeline.activation_codec import Formats
from pier_node.pipeline.context import Tools
from pier_node.pipeline.planning import plan as paths
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.planning.search import search
from pier_node.pipeline.stage import gather
from pier_node.pipeline.stage_state import StageState
from pier_node.rounds.attempt import Tools as RoundTools
from pier_node.rounds.catch_up import shadow_fetcher
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.rounds.state_store import Checkpoint
from pier_node.site.loop import Orders, run_work
from pier_node.site.pipeline_training import PipelineTraining
from pier_proto.v1.peer_pb2 import Pulse, Site


class PipelineNode:
    """One incarnation of a site."""

    def __init__(self, cluster: PipelineCluster, name: str) -> None:
        run, disk, length = cluster.config, cluster.disks[name], vote_state.length(cluster.config.pipeline.stages)
        self.carrier: SimCarrier = cluster.network.join(name)
        self.progress = Progress()
        self.roster = Roster(self.carrier, self.pulse)
        self.name = name
        state = cluster.states.get(name) or vote_state.beginning(run.pipeline.stages, cluster.names[0])
        faults = cluster.faults(name)
        keep, fetch = partial(cluster.keep, name), shadow_fetcher(self.carrier, length, 10.0)
        signed = PlainStatements(name)
        tools = RoundTools(
            self.carrier, self.roster, signed, disk, disk.proofs, keep, fetch, faults, weighing=one_result
        )
        self.rounds = Rounds(tools, state, lambda _: length, nonces(name + str(next(cluster.incarnations))))
        self.stage_state = StageState(cluster.folder / name, run)
        memory, formats = run.pipeline.memory, Formats.of(run, bf16=False)
        self.thread = Hanging()
        work = Tools(
            self.carrier, self.roster, self.thread, self._rows, memory, formats, faults, founder=cluster.names[0]
        )
        device = torch.device("cpu")
        self.orders = Orders()
        ends = partial(cluster.committed, name), self._end, cluster.planned, self.orders, _searched
        self.training = PipelineTraining(run, self.rounds, self.stage_state, work, self.progress, device, *ends)
        self.whole: Vector | None = None
        for other in cluster.names:
            self.roster.add(Site(node=other))
        for contact in self.roster.contacts.values():
            assert contact.task
            self.carrier.tasks.add(contact.task)
        self.carrier.spawn(self.rounds.run())
        self.main = self.carrier.spawn(run_work(self.training, self.roster, self.orders))

    def pulse(self) -> Pulse:
        state, progress = self.rounds.state, self.progress
        return Pulse(
            site=Site(node=self.carrier.node),
            phase=progress.phase,
            round=state.round,
            digest=state.digest,
            training_for=progress.training_for,
            place=self.training.place() if hasattr(self, "training") else None,
            gives=hasattr(self, "training") and self.training.gives,
        )

    async def _end(self, model: Checkpoint) -> None:
        self.whole = model.state.anchor

    def _rows(self, step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rows(self.name, step, place)


class PipelineCluster:
    """All sites, their disks, and what each of them committed.

    Args:
        fail_at: (node, round, phase) -> "stop" for ever or "restart" after a while.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        weather: Weather = CALM,
        seed: int = 1,
        fail_at: dict[tuple[str, int, str], str] | None = None,
    ) -> None:
        self.config, self.folder = config, folder
        self.names = [chr(ord("a") + index) for index in range(config.run.sites)]
        self.network = Network(seed, weather)
        self.disks = {name: Disk() for name in self.names}
        self.states: dict[str, OuterState] = {}
        self.digests: dict[int, set[bytes]] = defaultdict(set)
        self.nodes: dict[str, PipelineNode] = {}
        self.incarnations = iter(range(1 << 30))
        self.fail_at = fail_at or {}
        self.away: set[str] = set()
        self.problems: list[Problem] = []
        self.struck: list[tuple[str, int, str]] = []
        self.counted: set[int] = set()

    def boot(self, name: str) -> None:
        self.away.discard(name)
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.nodes[name] = PipelineNode(self, name)

    def crash(self, name: str) -> None:
        self.nodes.pop(name, None)
        self.network.crash(name)

    async def run(self, within: float = 3600.0) -> None:
        """Until the sites that are there have finished. Raises TimeoutError."""
        for name in self.names:
            self.boot(name)
        async with asyncio.timeout(within):
            while self.away or not all(node.main.done() for node in self.nodes.values()):
                self._check()
                await asyncio.sleep(1.0)
        self._check()

    def _check(self) -> None:
        """Raise what ended a site, but for what a test does: the only site of a stage is gone for good."""
        for node in self.nodes.values():
            error = node.main.exception() if node.main.done() else None
            if error and "the stages cannot be joined" not in str(error):
                raise error

    async def keep(self, name: str, state: OuterState) -> None:
        self.digests[state.round].add(state.digest)
        self.states[name] = state

    async def committed(self, name: str, state: OuterState) -> None:
        self.counted.add(vote_state.vote_state_of(state).counted)

    def faults(self, name: str) -> Faults:
        async def strike(round: int, phase: str) -> None:
            fate = self.fail_at.pop((name, round, phase), None)
            if fate is None:
                return
            self.struck.append((name, round, phase))
            asyncio.get_running_loop().call_soon(self.crash, name)
            if fate == "restart":
                self.away.add(name)
                asyncio.get_running_loop().call_later(20 * self.network.random.random(), self.boot, name)
            await asyncio.Event().wait()

        return Faults(strike)

    def planned(self, _round: int, problem: Problem, plan: paths.Plan) -> None:
        self.problems.append(problem)

    def voted(self) -> vote_state.VoteState:
        """Of the site that is furthest."""
        return vote_state.vote_state_of(
            max((node.rounds.state for node in self.nodes.values()), key=lambda it: it.round)
        )

    def joined(self, name: str = "") -> Vector:
        """The whole model, of the stages as they count; replicas hold the same bits."""
        versions, parts = self.voted().versions, dict[int, Vector]()
        for node in self.nodes.values():
            stage_state = node.stage_state
            if (
                stage_state.stage is not None
                and stage_state.state
                and stage_state.version == versions[stage_state.stage]
            ):
                known = parts.setdefault(stage_state.stage, stage_state.state.anchor)
                assert np.array_equal(known, stage_state.state.anchor), f"replicas of stage {stage_state.stage} differ"
        whole = np.full(_length(self.config), np.nan, np.float32)
        gather(self.config.model, self.config.pipeline.stages, parts, whole)
        return whole


def one_result(_round: int) -> Weighing:
    return vote_state.ONE_RESULT


def _length(config: RunConfig) -> int:
    from pier_node.outer.layout import Layout

    return Layout.of(config.model).length


async def _searched(problem: Problem, seed: int, seconds: float, current: paths.Plan, stay: bool) -> paths.Plan:
    return search(problem, seed, seconds, current if stay else None, deadline=math.inf).plan
