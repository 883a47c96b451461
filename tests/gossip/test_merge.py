"""The merge at the end of a run in pairs (docs/noloco.md, "The end"), by whole simulated runs."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from rounds.cases import LENGTH, outer_state, shared
from simulation.faults import storms
from simulation.network import Weather
from simulation.pair_cluster import PairCluster, check, config
from simulation.virtual_time import run

from pier_node.base.faults import PHASES
from pier_node.base.shared import Vector
from pier_node.gossip.merge import PATIENCE, merged
from pier_node.rounds.roster import Roster
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import Pulse, Site

NAMES = ["a1", "b2", "c3", "d4"]
ROUNDS = 4
STORMS = storms(120)


def test_the_merged_state() -> None:
    state = merged(outer_state("ab", round=7), shared(np.arange(LENGTH, dtype=np.float32)), {"b": 1, "a": 1})
    assert (state.round, state.members, state.ledger) == (8, ("a", "b"), {})
    np.testing.assert_array_equal(state.anchor, np.arange(LENGTH))
    np.testing.assert_array_equal(state.momentum, np.zeros(LENGTH))


class MergeCluster(PairCluster):
    """Notes each site's anchor after its last round in pairs."""

    def last_anchors(self) -> dict[str, Vector]:
        return {name: steps[ROUNDS].after.anchor for name, steps in self.steps.items() if ROUNDS in steps}


def played(cluster: PairCluster, survivors: list[str], within: float = 12 * 3600.0) -> None:
    async def main() -> None:
        for name in cluster.names:
            cluster.boot(name)
        await cluster.settle(survivors, within)

    run(main())


def finals(cluster: PairCluster, survivors: list[str]) -> set[tuple[int, bytes]]:
    return {(cluster.nodes[name].rounds.state.round, cluster.nodes[name].rounds.state.digest) for name in survivors}


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_all_end_with_the_mean_of_their_models(sites: int) -> None:
    cluster = MergeCluster(config(sites, rounds=ROUNDS, final_merge=True), NAMES[:sites], seed=2)
    played(cluster, cluster.names)
    ((number, _),) = finals(cluster, cluster.names)
    assert number == ROUNDS + 1
    anchors = cluster.last_anchors()
    assert len(anchors) == sites
    assert sites == 2 or len({anchor.tobytes() for anchor in anchors.values()}) > 1, "they were different before"
    for node in cluster.nodes.values():
        assert node.rounds.state.members == tuple(cluster.names)
        np.testing.assert_allclose(node.rounds.state.anchor, np.mean([*anchors.values()], axis=0), atol=1e-7)
        progress = node.training.progress
        assert progress.validation_loss == pytest.approx(float(node.rounds.state.anchor.sum()))
        losses = [float(anchor.sum()) for anchor in anchors.values()]  # a pulse with one of them may come too late
        assert min(losses) - 1e-5 <= progress.members_loss <= max(losses) + 1e-5


def test_without_it_no_model_is_changed() -> None:
    cluster = MergeCluster(config(3, rounds=ROUNDS), NAMES[:3], seed=2)
    played(cluster, cluster.names)
    check(cluster, cluster.names, ROUNDS)
    for name, anchor in cluster.last_anchors().items():
        assert cluster.nodes[name].rounds.state.anchor is anchor


def test_a_site_on_its_own_keeps_its_model() -> None:
    cluster = MergeCluster(config(1, rounds=ROUNDS, final_merge=True), NAMES[:1], seed=2)
    played(cluster, cluster.names)
    check(cluster, cluster.names, ROUNDS)


@pytest.mark.parametrize("fate", ["stop", "restart"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "fetching"])
def test_a_crash_in_the_merge_leaves_one_model_of_all_that_are_left(phase: str, fate: str) -> None:
    for victim in ("a1", "c3"):
        cluster = MergeCluster(
            config(3, rounds=ROUNDS, final_merge=True), NAMES[:3], seed=5, fail_at={(victim, ROUNDS + 1, phase): fate}
        )
        survivors = [name for name in cluster.names if name != victim or fate == "restart"]
        played(cluster, survivors)
        assert victim in cluster.crashed
        assert len(finals(cluster, survivors)) == 1
        assert cluster.nodes[survivors[0]].rounds.state.round == ROUNDS + 1


def test_who_cannot_reach_the_others_ends_with_its_own_model() -> None:
    cluster = MergeCluster(config(3, rounds=ROUNDS, final_merge=True), NAMES[:3], 3, Weather(delay=0.01, jitter=0.0))

    async def main() -> None:
        for name in cluster.names:
            cluster.boot(name)
        pairs = cluster.nodes["c3"].rounds
        await cluster.nodes["c3"].roster.changed.until(lambda: pairs.state.round == ROUNDS - 1)
        cluster.network.partition({"a1", "b2"}, {"c3"})
        await cluster.settle(cluster.names, 4 * PATIENCE)

    run(main())
    rounds = {name: cluster.nodes[name].rounds.state.round for name in cluster.names}
    assert rounds == {"a1": ROUNDS + 1, "b2": ROUNDS + 1, "c3": ROUNDS}
    assert cluster.nodes["a1"].rounds.state.digest == cluster.nodes["b2"].rounds.state.digest


def test_whoever_comes_back_after_the_merge_takes_its_result() -> None:
    cluster = MergeCluster(
        config(3, rounds=ROUNDS, final_merge=True), NAMES[:3], seed=5, fail_at={("b2", ROUNDS, "saved"): "stop"}
    )

    async def main() -> None:
        for name in cluster.names:
            cluster.boot(name)
        await cluster.settle(["a1", "c3"], 7200.0)
        assert "b2" in cluster.crashed
        cluster.boot("b2")
        await cluster.settle(["b2"], 7200.0)

    run(main())
    assert len(finals(cluster, cluster.names)) == 1


@pytest.mark.parametrize("standing", [True, False])
def test_who_only_says_that_the_models_are_merged_keeps_nobody_from_merging(
    standing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether or not it has standing: its state has no votes."""
    names = NAMES[:3]
    cluster = MergeCluster(config(3, rounds=ROUNDS, final_merge=True), names, seed=2, founder="" if standing else "a1")

    async def main() -> None:
        carrier = cluster.network.join("z9")
        invented = outer_state(["z9"], round=ROUNDS + 1, anchor=[9.0] * LENGTH)
        Roster(carrier, lambda: Pulse(site=Site(node="z9"), round=invented.round, digest=invented.digest))
        StateServer(carrier, lambda number, shadow: invented)
        for name in names:
            cluster.boot(name)
            cluster.nodes[name].roster.add(Site(node="z9", address="sim"))
        await cluster.settle(names, 12 * 3600.0)

    run(main())
    ((number, digest),) = finals(cluster, names)
    assert number == ROUNDS + 1
    assert digest != outer_state(["z9"], round=ROUNDS + 1, anchor=[9.0] * LENGTH).digest
    assert ("z9 says that the models are merged, but" in caplog.text) == standing


def weathered(seed: int) -> tuple[int, int]:
    """A run and its merge in a storm: how many models its survivors end with, and how many of these were merged."""
    dice = random.Random(seed)
    names = NAMES[: dice.choice([2, 3, 4])]
    weather = Weather(dice.choice([0.01, 0.2]), dice.choice([0.0, 0.5]), dice.choice([0.0, 0.02]), 0.1, 0.002)
    victim, fate = dice.choice(names), dice.choice(["stop", "restart"])
    crash = {(victim, 3, dice.choice(PHASES)): fate} if dice.random() < 0.7 else {}
    cluster = MergeCluster(config(len(names), rounds=2, final_merge=True), names, seed, weather, crash)
    survivors = [name for name in names if not crash or name != victim or fate == "restart"]
    logging.disable(logging.ERROR)
    played(cluster, survivors)
    by_members: dict[tuple[str, ...], set[bytes]] = defaultdict(set)
    for name in survivors:
        state = cluster.nodes[name].rounds.state
        if state.round == 3:
            by_members[state.members].add(state.digest)
    assert all(len(digests) == 1 for digests in by_members.values()), f"seed {seed}: members hold other bits"
    return len(finals(cluster, survivors)), len(by_members)


@pytest.mark.thorough
def test_storms() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        ends = Counter(pool.map(weathered, range(STORMS), chunksize=10))
    assert ends[1, 1] + ends[1, 0] > 0.95 * STORMS, "nearly always one model, of all that are left"
    assert ends[1, 1] > 0.8 * STORMS
