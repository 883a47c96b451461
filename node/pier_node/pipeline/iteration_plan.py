"""The iteration plan of one attempt, parsed from its message and checked: which site does which task.

A microbatch goes forward along its path, has its loss computed where it began, and goes backward along the path
(SkipPipe, arXiv 2502.19913). Hop h of a path over L sites is a forward for h < L, the loss for h = L, and a backward
after that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from pier_node.outer.noloco import groups
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import IterationPlan

Task = tuple[int, int]
"""A microbatch and a hop."""


@dataclass(frozen=True)
class Plan:
    """The iteration plan of one attempt.

    Attributes:
        name: SHA-256 of the message.
        stages: stage of each participating site, by node id.
        ways: for each microbatch, the nodes that it visits, hop by hop.
        waves: the microbatches of each wave.
        seed: the run's seed, from which pairs of replicas are drawn.
    """

    message: IterationPlan
    name: bytes
    stages: dict[str, int]
    ways: tuple[tuple[str, ...], ...]
    waves: tuple[range, ...]
    seed: int = 0

    @classmethod
    def read(cls, message: IterationPlan, stages: int, seed: int = 0) -> Plan:
        """Parse a message. Raises BadMessage: it is not a valid plan for a model of that many stages."""
        nodes = [*message.nodes]
        held = dict(zip(nodes, message.stages))
        if any(stage >= stages for stage in (*message.stages, *message.newcomers)):
            raise BadMessage(f"a plan with stages that a model of {stages} does not have")
        if bool(message.paths) == message.meet:
            raise BadMessage("a plan without microbatches" if not message.paths else "an outer round with microbatches")
        name = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        ways = tuple(_way([*path.sites], nodes, held) for path in message.paths)
        waves = tuple(range(*ends) for ends in pairwise(accumulate(message.waves, initial=0)))
        return cls(message, name, held, ways, waves, seed)

    @property
    def round(self) -> int:
        """The round that decides whether the attempt counts."""
        return self.message.round

    def length(self, microbatch: int) -> int:
        """Number of sites on the microbatch's path."""
        return len(self.ways[microbatch]) // 2

    def tasks(self, node: str) -> list[Task]:
        """All tasks of a node."""
        return [(number, hop) for number, way in enumerate(self.ways) for hop, at in enumerate(way) if at == node]

    @cached_property
    def weights(self) -> dict[str, int]:
        """Number of microbatches that visit each node."""
        return {node: len(self.visitors(node)) for node in self.stages}

    def visitors(self, node: str) -> list[int]:
        """The microbatches that visit a node, each once."""
        return sorted({microbatch for microbatch, _ in self.tasks(node)})

    def replicas(self, stage: int) -> list[str]:
        """The sites that hold a stage, in node-id order."""
        return [node for node, held in self.stages.items() if held == stage]

    def group(self, node: str, pairs: bool) -> list[str]:
        """The replicas that a site averages with, itself included; `pairs`: in pairs that are drawn for each round."""
        nodes = self.replicas(self.stages[node])
        return next([*it] for it in groups(self.seed, self.round, nodes) if node in it) if pairs else nodes

    @cached_property
    def visited(self) -> frozenset[int]:
        """The stages that any microbatch visits."""
        return frozenset(self.stages[node] for way in self.ways for node in way)

    @cached_property
    def ascends(self) -> bool:
        """Whether every microbatch visits stages in ascending order."""
        visits = [[self.stages[node] for node in way[: len(way) // 2]] for way in self.ways]
        return all(it == sorted(it) for it in visits)


def _way(path: list[int], nodes: list[str], held: dict[str, int]) -> tuple[str, ...]:
    if any(site >= len(nodes) for site in path):
        raise BadMessage("a path over sites that take no part")
    sites = [nodes[site] for site in path]
    stages = [held[site] for site in sites]
    if stages[:1] != [0] or len({*stages}) < len(stages):
        raise BadMessage(f"a path through the stages {stages}: it must begin at 0 and visit each once")
    return (*sites, sites[0], *reversed(sites))
