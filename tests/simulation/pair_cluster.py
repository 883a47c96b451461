"""A run in pairs, watched: every step with what it was made of, and how long it took."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from simulation.cluster import Cluster, Node

from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.outer.mean import Update
from pier_node.outer.state import OuterState


@dataclass
class Step:
    """One site's round, from its own point of view."""

    before: OuterState
    weights: Vector
    after: OuterState
    seconds: float


@dataclass
class PairCluster(Cluster):
    """Records what `PairRounds` does at every site."""

    steps: dict[str, dict[int, Step]] = field(default_factory=lambda: defaultdict(dict))
    adopted: set[str] = field(default_factory=set)
    """Sites that went on from another's state."""
    saved: dict[int, dict[str, tuple[str, ...]]] = field(default_factory=lambda: defaultdict(dict))
    """Members by site by round, of all that was ever on a disk."""

    def boot(self, name: str) -> None:
        super().boot(name)
        pairs = self.nodes[name].rounds
        assert isinstance(pairs, PairRounds)
        commit, adopt = pairs.commit, pairs.adopt

        async def watched(number: int, update: Update, saved: Any, sites: int = 1) -> OuterState:
            before, weights, loop = pairs.state, update.vector.copy(), asyncio.get_running_loop()
            began = loop.time()
            after = await commit(number, update, saved, sites)
            self.steps[name][after.round] = Step(before, weights, after, loop.time() - began)
            return after

        async def adopting(state: OuterState) -> None:
            self.adopted.add(name)
            await adopt(state)

        pairs.commit, pairs.adopt = watched, adopting  # type: ignore[method-assign]

    @property
    def following(self) -> set[str]:
        """Sites that were about to go on from another's state when the run ended."""
        return {
            name
            for name, node in self.nodes.items()
            if isinstance(node.rounds, PairRounds) and node.rounds._outcomes._source
        }

    def in_doubt(self, name: str, number: int) -> bool:
        """Whether a site still remembers that it does not know how a round ended."""
        return number in self.disks[name].pairs.doubts

    def _keeping(self, name: str) -> Any:
        keep = super()._keeping(name)

        async def noting(state: OuterState) -> None:
            self.saved[state.round][name] = state.members
            await keep(state)

        return noting


def config(sites: int, rounds: int = 6, steps: int = 4, **outer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"sites": sites},
            "inner": {"total_steps": rounds * steps, "eval_every": 0},
            "outer": {"algorithm": "noloco", "inner_steps": steps, **outer},
        }
    )


def check(cluster: PairCluster, survivors: Iterable[str], rounds: int) -> None:
    """The invariants of a run in pairs that has ended."""
    for name in survivors:
        assert cluster.nodes[name].rounds.state.round == rounds, f"seed {cluster.seed}: {name} is not at the end"
        if name not in cluster.crashed | cluster.adopted:
            assert _learned(cluster.nodes[name], name) == cluster.nodes[name].trainer.steps_done
    both_or_neither(cluster)
    for by_round in cluster.steps.values():
        for number, step in by_round.items():
            assert step.after.round == number > step.before.round
    conserved(cluster)


def _learned(node: Node, name: str) -> int:
    return node.rounds.state.ledger.get(name, 0) + node.training._unsent.tokens[0]


def both_or_neither(cluster: PairCluster) -> None:
    """Whoever took a step with a partner has one that took it too, unless one of them went down or was put right."""
    for number, by_site in cluster.saved.items():
        for name, members in by_site.items():
            for partner in set(members) - {name}:
                decider = min(members)
                agreed = by_site.get(partner) == members
                put_right = {name, partner} & (cluster.adopted | cluster.following)
                excused = cluster.crashed & {name, partner} or put_right or cluster.in_doubt(partner, number)
                where = f"seed {cluster.seed}, round {number}: {name} with {partner}, which says {by_site.get(partner)}"
                assert agreed or (excused and decider == name), where


def conserved(cluster: PairCluster) -> None:
    """The sum over a pair moves as if both had gone alone: δ' = α·Σδ − β·ΣΔ (NoLoCo, arXiv 2506.10911)."""
    rates = cluster.config.outer.noloco
    for name, by_round in cluster.steps.items():
        for number, step in by_round.items():
            members = step.after.members
            parts = [cluster.steps[node].get(number) for node in members if node in cluster.steps]
            known = [part for part in parts if part and part.after.members == members]
            if name != members[0] or len(known) < len(members):
                continue
            pushed = sum(
                rates.alpha * part.before.momentum - rates.beta * (part.before.anchor - part.weights) for part in known
            )
            np.testing.assert_allclose(sum(part.after.momentum for part in known), pushed, rtol=0, atol=1e-5)
            for part in known:
                np.testing.assert_array_equal(part.after.anchor, part.before.anchor + part.after.momentum)
