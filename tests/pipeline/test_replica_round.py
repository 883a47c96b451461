"""Runs whose replicas step apart and meet, against one process that does the same; equal bits; what deaths cost."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from pipeline.cases import config, rows
from pipeline.cluster import PipelineCluster
from simulation.virtual_time import run
from torch import Tensor
from torch.nn import functional

from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.inner_optimizer import step_vectors
from pier_node.outer.layout import Layout
from pier_node.outer.mean import Update
from pier_node.outer.schedule import lr_at, momentum_at, total_rounds
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.pipeline import vote_state
from pier_node.pipeline.beginnings import made
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.stage import Stage, gather, scatter, stage_blocks, stage_layout
from pier_node.trainer.model.decoder import Decoder
from pier_proto.v1.peer_pb2 import Total

PIER: dict[str, Any] = {"algorithm": "pier", "start": "none"}


def meeting(sites: int = 6, steps: int = 8, outer: dict[str, Any] = PIER, **pipeline: Any) -> RunConfig:
    """Replicas that meet after every second step."""
    tables = config(**{"paths": "random", **pipeline}).model_dump(mode="json")
    tables["run"]["sites"], tables["inner"]["total_steps"] = sites, steps
    tables["outer"] = {**outer, "inner_steps": 2}
    return RunConfig.model_validate(tables)


class OneProcess:
    """Takes the same iterations and outer steps, with plain loops over sites and microbatches."""

    def __init__(self, tables: RunConfig) -> None:
        self.tables, self.stages = tables, tables.pipeline.stages
        self.anchors = {stage: made(tables, stage) for stage in range(self.stages)}
        self.momenta = {stage: np.zeros_like(it) for stage, it in self.anchors.items()}
        self.weights: dict[str, Vector] = {}
        self.adam: dict[str, list[Vector]] = {}
        self.steps: dict[str, int] = defaultdict(int)
        self.seen: dict[str, int] = defaultdict(int)

    def follow(self, plan: Plan) -> None:
        for node, stage in plan.stages.items():
            if node not in self.weights:
                self.weights[node] = self.anchors[stage].copy()
                self.adam[node] = [np.zeros_like(self.anchors[stage]) for _ in range(2)]
        if plan.message.meet:
            for stage in {*plan.stages.values()}:
                self.meet(plan, stage)
        else:
            self.iterate(plan)

    def iterate(self, plan: Plan) -> None:
        sums: dict[str, Vector] = {node: np.zeros_like(self.weights[node]) for node in plan.stages}
        counts, places = defaultdict[str, int](int), defaultdict[str, int](int)
        for way in plan.ways:
            path = way[: len(way) // 2]
            whole = self.gradient(path, plan, places[path[0]])
            places[path[0]] += 1
            for node in path:
                sums[node] += scatter(self.tables.model, self.stages, whole, plan.stages[node])
                counts[node] += 1
        means = {node: sums[node] / count for node, count in counts.items()}
        square = 0.0
        for stage in {plan.stages[node] for node in means}:
            there = [node for node in plan.replicas(stage) if node in means]
            square += sum(counts[it] * float((means[it].astype(float) ** 2).sum()) for it in there) / sum(
                counts[it] for it in there
            )
        clip = min(1.0, self.tables.inner.clip_norm / (square**0.5 + 1e-6))
        for node, mean in means.items():
            self.adamw(node, plan.stages[node], (mean * np.float32(clip)).astype(np.float32), plan.message.step)
            self.seen[node] += counts[node]

    def gradient(self, path: tuple[str, ...], plan: Plan, place: int) -> Vector:
        layout, model = Layout.of(self.tables.model), Decoder(self.tables.model)
        flat = np.zeros(layout.length, np.float32)
        gather(self.tables.model, self.stages, {plan.stages[it]: self.weights[it] for it in path}, flat)
        layout.load(model, torch.from_numpy(flat))
        inputs, targets = rows(path[0], plan.message.step, place)
        x = model.embed(inputs)
        rotation = model._rotation(x)
        for node in path:
            for block in stage_blocks(self.tables.model.layers, self.stages)[plan.stages[node]]:
                x = model.blocks[str(block)](x, rotation)
        torch.autograd.backward(functional.cross_entropy(model.predict(x).flatten(0, 1), targets.flatten()))
        found = torch.zeros(layout.length)
        layout.store({name: it.grad for name, it in model.named_parameters() if it.grad is not None}, found)
        return found.numpy()

    def adamw(self, node: str, stage: int, gradient: Vector, step: int) -> None:
        layout = stage_layout(self.tables.model, self.stages, stage)
        inner = self.tables.inner.model_copy(update={"clip_norm": 0.0})
        first, second = map(torch.from_numpy, self.adam[node])
        weights, flat = map(torch.from_numpy, (self.weights[node], gradient))
        step_vectors(layout, weights, (first, second, self.steps[node]), flat, step, inner)
        self.steps[node] += 1

    def meet(self, plan: Plan, stage: int) -> None:
        nodes, done = plan.replicas(stage), plan.message.step / self.tables.inner.total_steps
        weight = sum(self.seen[node] for node in nodes)
        if not weight:
            return
        delta = sum(self.seen[it] * (self.anchors[stage] - self.weights[it]).astype(float) for it in nodes) / weight
        momentum, lr = momentum_at(self.tables.outer, done), lr_at(self.tables.outer, done)
        self.momenta[stage] = (momentum * self.momenta[stage] + delta).astype(np.float32)
        self.anchors[stage] = (self.anchors[stage] - lr * (delta + momentum * self.momenta[stage])).astype(np.float32)
        for node in nodes:
            self.weights[node], self.seen[node] = self.anchors[stage].copy(), 0


class Pairs(OneProcess):
    """The same with NoLoCo's steps (arXiv 2506.10911): each replica has a φ and a δ of its own."""

    def __init__(self, tables: RunConfig) -> None:
        super().__init__(tables)
        self.own: dict[str, list[Vector]] = {}

    def meet(self, plan: Plan, stage: int) -> None:
        rates, nodes = self.tables.outer.noloco, plan.replicas(stage)
        for node in nodes:
            self.own.setdefault(node, [self.anchors[stage].copy(), np.zeros_like(self.anchors[stage])])
        for pair in {tuple(plan.group(node, pairs=True)) for node in nodes}:
            weights = sum(self.weights[it].astype(float) for it in pair) / len(pair)
            anchors = sum(self.own[it][0].astype(float) for it in pair) / len(pair)
            for node in pair:
                anchor, momentum = self.own[node]
                delta = rates.alpha * momentum - rates.beta * (anchors - weights) + rates.gamma * (anchors - anchor)
                self.own[node] = [(anchor + delta).astype(np.float32), delta.astype(np.float32)]
                self.weights[node], self.seen[node] = self.own[node][0].copy(), 0


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[int, Plan]:
    """By version, of all attempts that any site was ready for."""
    found: dict[int, Plan] = {}
    ready = vote_state.ready

    def note(plan: Plan, total: Total, stages: int, apart: bool = False) -> Update:
        found[vote_state.version(plan.round, vote_state.tag_of(vote_state.name_of(plan, total)))] = plan
        return ready(plan, total, stages, apart)

    monkeypatch.setattr(vote_state, "ready", note)
    return found


P = TypeVar("P", bound=OneProcess)


def alike(cluster: PipelineCluster, plans: dict[int, Plan], process: P) -> P:
    """One process that did what counted."""
    for version in sorted(cluster.counted - {0}):
        process.follow(plans[version])
    return process


def followed(cluster: PipelineCluster, plans: dict[int, Plan]) -> Vector:
    """The whole model of one process that does what counted."""
    tables = cluster.config
    process, whole = alike(cluster, plans, OneProcess(tables)), np.empty(Layout.of(tables.model).length, np.float32)
    gather(tables.model, tables.pipeline.stages, process.anchors, whole)
    return whole


def first(tables: RunConfig) -> Vector:
    whole = np.empty(Layout.of(tables.model).length, np.float32)
    gather(tables.model, tables.pipeline.stages, {it: made(tables, it) for it in range(tables.pipeline.stages)}, whole)
    return whole


def check(cluster: PipelineCluster, whole: bool = True) -> None:
    """All steps are taken, no two sites differ, nothing is broken; `whole`: every stage has a site."""
    total = cluster.config.inner.total_steps
    assert (cluster.voted().steps, cluster.voted().met) == (total, total)
    assert np.isfinite(cluster.joined()).all() == whole
    assert all(len(found) == 1 for found in cluster.digests.values())


KINDS = {
    "two replicas of each stage": meeting(4, stages=2, paths="full"),
    "random paths, unequal microbatches": meeting(),
    "a last interval that is shorter": meeting(steps=7),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_joined_model_is_that_of_one_process(tmp_path: Path, kind: str, plans: dict[int, Plan]) -> None:
    tables = KINDS[kind]
    cluster = PipelineCluster(tables, tmp_path)
    run(cluster.run())
    check(cluster)
    assert max(cluster.digests) == total_rounds(tables)
    stages = [[plan.weights[it] for it in plan.replicas(stage)] for plan in plans.values() for stage in plan.visited]
    unequal = any(len({*weights}) > 1 for weights in stages)
    assert unequal == (kind != "two replicas of each stage")
    expected = followed(cluster, plans)
    assert np.abs(expected - first(tables)).max() > 1e-3
    np.testing.assert_allclose(cluster.joined(), expected, rtol=1e-3, atol=3e-6)


CODECS = {"int4": 0.03, "int8": 0.002, "bf16": 0.001}
"""How far the model may end from the uncompressed one, relative to how far that has moved."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", CODECS)
def test_with_a_codec_replicas_end_equal_and_near_those_of_one_process(
    tmp_path: Path, codec: str, plans: dict[int, Plan]
) -> None:
    cluster = PipelineCluster(meeting(outer={**PIER, "codec": codec}), tmp_path)
    run(cluster.run())
    check(cluster)
    expected = followed(cluster, plans)
    off, moved = (float(np.linalg.norm(expected - it)) for it in (cluster.joined(), first(cluster.config)))
    assert 0 < off < CODECS[codec] * moved


PHASES = ("exchanging", "summed", "prepared", "voting")
ITERATION, OUTER = 5, 3
"""Rounds of a run that meets after every second step: 1, 2, 4, 5, 7, 8 are iterations, 3, 6, 9 outer rounds."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_site_that_dies_in_an_outer_round_costs_an_attempt(tmp_path: Path, victim: str, phase: str) -> None:
    """`a` plans, and is the only site of its stage; `b` has a replica."""
    cluster = PipelineCluster(meeting(steps=6), tmp_path, fail_at={(victim, OUTER, phase): "stop"})
    run(cluster.run())
    assert cluster.struck == [(victim, OUTER, phase)]
    check(cluster, whole=victim == "b")
    assert max(cluster.digests) <= total_rounds(cluster.config) + 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", ["forward", "prepared", "voting", "committed"])
def test_what_a_lost_replica_did_is_lost_with_it_and_nothing_else(
    tmp_path: Path, phase: str, plans: dict[int, Plan]
) -> None:
    cluster = PipelineCluster(meeting(steps=6), tmp_path, fail_at={("b", ITERATION, phase): "stop"})
    run(cluster.run())
    assert cluster.struck == [("b", ITERATION, phase)]
    check(cluster)
    np.testing.assert_allclose(cluster.joined(), followed(cluster, plans), rtol=1e-3, atol=3e-6)


RETURNS = [(ITERATION, "prepared"), (ITERATION, "voting"), (OUTER, "summed"), (OUTER, "voting"), (OUTER, "committed")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize(("round", "phase"), RETURNS)
def test_a_site_that_comes_back_takes_its_stage_again(tmp_path: Path, round: int, phase: str, codec: str) -> None:
    cluster = PipelineCluster(
        meeting(steps=14, outer={**PIER, "codec": codec}), tmp_path, fail_at={("c", round, phase): "restart"}
    )
    run(cluster.run())
    assert cluster.struck == [("c", round, phase)]
    check(cluster)
    back = cluster.nodes["c"].stage_state
    assert back.stage is not None
    assert back.version == cluster.voted().versions[back.stage]


def test_the_only_site_of_a_stage_goes_on_from_its_own_steps(tmp_path: Path, plans: dict[int, Plan]) -> None:
    tables = meeting(4, steps=6, paths="full", microbatches=2)
    cluster = PipelineCluster(tables, tmp_path, fail_at={("d", ITERATION, "prepared"): "restart"})
    run(cluster.run())
    assert cluster.struck == [("d", ITERATION, "prepared")]
    check(cluster)
    np.testing.assert_allclose(cluster.joined(), followed(cluster, plans), rtol=1e-3, atol=3e-6)


LAST = 8
"""The last iteration of such a run of six steps; an outer round follows."""


@pytest.mark.parametrize(("round", "phase"), [(LAST, "committed"), (LAST + 1, "exchanging")])
def test_the_last_outer_round_waits_for_the_only_site_of_a_stage(
    tmp_path: Path, plans: dict[int, Plan], round: int, phase: str
) -> None:
    """It could bring its steps to no other one, and the model would lack them."""
    tables = meeting(4, steps=6, paths="full", microbatches=2)
    cluster = PipelineCluster(tables, tmp_path, fail_at={("d", round, phase): "restart"})
    run(cluster.run())
    assert cluster.struck == [("d", round, phase)]
    check(cluster)
    assert {vote_state.round_of(version) for version in cluster.voted().versions} == {max(cluster.digests)}
    np.testing.assert_allclose(cluster.joined(), followed(cluster, plans), rtol=1e-3, atol=3e-6)


def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    tables = meeting(4, steps=6, paths="full", microbatches=2)
    cluster = PipelineCluster(tables, tmp_path, fail_at={("d", LAST, "committed"): "stop"})
    run(cluster.run(within=600.0))
    assert (cluster.voted().steps, cluster.voted().met) == (6, 6)


def test_a_step_that_did_not_count_is_forgotten_by_a_site_that_dies_as_it_learns_that(
    tmp_path: Path, plans: dict[int, Plan]
) -> None:
    """The round is empty because of `d`; `c` has it on disk, and its own step of it, too."""
    died = {("d", ITERATION, "prepared"): "restart", ("c", ITERATION, "committed"): "restart"}
    cluster = PipelineCluster(meeting(4, steps=6, paths="full", microbatches=2), tmp_path, fail_at=dict(died))
    run(cluster.run())
    assert {*cluster.struck} == {*died}
    check(cluster)
    np.testing.assert_allclose(cluster.joined(), followed(cluster, plans), rtol=1e-3, atol=3e-6)


def test_a_start_averages_at_every_step_and_gathers_momentum(tmp_path: Path) -> None:
    cluster = PipelineCluster(meeting(4, outer={**PIER, "start": "sync"}, stages=2, paths="full"), tmp_path)
    run(cluster.run())
    check(cluster)
    assert max(cluster.digests) == 8 + 3


def finished(cluster: PipelineCluster) -> None:
    """All steps are taken, and all sites have the versions that count, of finite numbers."""
    now, total = cluster.voted(), cluster.config.inner.total_steps
    assert (now.steps, now.met) == (total, total)
    assert all(len(found) == 1 for found in cluster.digests.values())
    for node in cluster.nodes.values():
        stage_state = node.stage_state
        assert stage_state.stage is not None
        assert stage_state.state
        assert stage_state.version == now.versions[stage_state.stage]
        assert np.isfinite(stage_state.state.anchor).all()


NOLOCO: dict[str, dict[str, Any]] = {
    "weights alone travel": {"algorithm": "noloco"},
    "anchors too": {"algorithm": "noloco", "noloco": {"alpha": 0.3, "beta": 0.8, "gamma": 0.4}},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", NOLOCO)
def test_replicas_that_meet_in_pairs_are_those_of_one_process(
    tmp_path: Path, kind: str, plans: dict[int, Plan]
) -> None:
    """Three replicas of each stage: one is left over in every round, and no two are equal in the end."""
    cluster = PipelineCluster(meeting(steps=7, outer=NOLOCO[kind], stages=2, skip=0.0), tmp_path)
    run(cluster.run())
    finished(cluster)
    process = alike(cluster, plans, Pairs(cluster.config))
    assert {len(plan.group(node, pairs=True)) for plan in plans.values() for node in plan.stages} == {1, 2}
    for name, node in cluster.nodes.items():
        assert node.stage_state.state
        for tensor, expected in zip((ANCHOR, MOMENTUM), process.own[name], strict=True):
            found = node.stage_state.state.tensors[tensor].array
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=3e-6)
    assert len({node.stage_state.state.digest for node in cluster.nodes.values() if node.stage_state.state}) == 6


PAIR_CODECS = {"int4": 0.08, "int8": 0.015, "bf16": 0.004}
"""How far a stage may end from the uncompressed one, relative to its weights, which are what pairs send."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", PAIR_CODECS)
@pytest.mark.parametrize("kind", NOLOCO)
def test_with_a_codec_pairs_end_near_those_of_one_process(
    tmp_path: Path, kind: str, codec: str, plans: dict[int, Plan]
) -> None:
    cluster = PipelineCluster(meeting(steps=7, outer=NOLOCO[kind] | {"codec": codec}, stages=2, skip=0.0), tmp_path)
    run(cluster.run())
    finished(cluster)
    process = alike(cluster, plans, Pairs(cluster.config))
    for name, node in cluster.nodes.items():
        assert node.stage_state.state
        expected = process.own[name][0]
        off = float(np.linalg.norm(node.stage_state.state.anchor - expected))
        assert 0 < off < PAIR_CODECS[codec] * float(np.linalg.norm(expected))


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(("round", "phase"), RETURNS)
def test_a_site_of_a_pair_that_comes_back_goes_on(tmp_path: Path, round: int, phase: str, codec: str) -> None:
    """From its own disk, or from any replica's anchor and momentum, as whoever joins NoLoCo does."""
    faults = {("c", round, phase): "restart"}
    tables = meeting(steps=14, outer={"algorithm": "noloco", "codec": codec}, stages=2, skip=0.0)
    cluster = PipelineCluster(tables, tmp_path, fail_at=faults)
    run(cluster.run())
    assert cluster.struck == [("c", round, phase)]
    finished(cluster)


LOADED: dict[int, Vector] = {}


class Checked(PipelineCluster):
    """After an outer round every stage has the weights of its stage_state."""

    checks = 0

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        node = self.nodes[name]
        if state.round == 3 and node.training._stage:
            assert np.array_equal(LOADED[id(node.training._stage)], node.stage_state.working.anchor)
            self.checks += 1


def test_after_an_outer_round_of_nothing_a_stage_has_the_weights_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Stage.load

    def noted(stage: Stage, weights: Tensor) -> None:
        LOADED[id(stage)] = weights.numpy().copy()
        load(stage, weights)

    monkeypatch.setattr(Stage, "load", noted)
    monkeypatch.setattr("pier_node.pipeline.stage_state.norm_limit", lambda _: 0.0)
    tables = config(2, layers=2, paths="full", microbatches=2).model_dump(mode="json")
    tables["inner"]["total_steps"] = 4
    tables["outer"] = {"algorithm": "pier", "start": "none", "inner_steps": 2}
    cluster = Checked(RunConfig.model_validate(tables), tmp_path)
    run(cluster.run())
    assert cluster.checks == 2
    assert {it.stage_state.version for it in cluster.nodes.values()} == {0}
