"""Whole pipelined runs in virtual time, against one process that takes the same steps: with deaths, and with hangs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pipeline.cases import BATCH, CONTEXT, SEED, config, iteration_plan, rows
from pipeline.cluster import PipelineCluster, PipelineNode
from rounds.cases import CALM
from simulation.cluster import Disk
from simulation.network import Network
from simulation.virtual_time import run
from torch.nn import functional

from pier_node.base.errors import PierError
from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.inner_optimizer import Moments, take_step
from pier_node.outer.layout import Layout
from pier_node.outer.mean import Update, weighted_mean
from pier_node.outer.state import OuterState
from pier_node.pipeline import stage_state, vote_state
from pier_node.pipeline.beginnings import Beginnings
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.planning import plan as paths
from pier_node.pipeline.planning.problem import Problem
from pier_node.pipeline.stage import Stage
from pier_node.pipeline.stage_step import FULL_EVERY
from pier_node.rounds import catch_up
from pier_node.site import pipeline_training
from pier_node.site.pipeline_training import HOPELESS
from pier_node.trainer.model import hub
from pier_node.trainer.model.decoder import Decoder
from pier_node.trainer.model.initial import initial_weights
from pier_node.wire.carrier import DESCRIBE, ROUTE, PeerLost
from pier_proto.v1.peer_pb2 import IterationPlan, Phase, Site, StateRequest, Total

LONG = 40
"""Steps of a run that is not over before a site comes back."""


def six(paths: str = "random", steps: int = 6) -> RunConfig:
    tables = config(paths=paths).model_dump(mode="json")
    tables["run"]["sites"], tables["inner"]["total_steps"] = 6, steps
    return RunConfig.model_validate(tables)


def test_a_run_takes_all_its_steps_and_replicas_stay_equal(tmp_path: Path) -> None:
    cluster = PipelineCluster(six(), tmp_path)
    run(cluster.run())
    assert cluster.voted().steps == 6
    assert max(cluster.digests) == 6
    assert all(len(found) == 1 for found in cluster.digests.values())
    assert np.isfinite(cluster.joined()).all()
    tokens = sum(node.progress.tokens for node in cluster.nodes.values())
    assert tokens == pytest.approx(6 * 4 * BATCH * CONTEXT, rel=0.05)


class KeepsTokens(PipelineCluster):
    """Notes the tokens that each site writes to its disk with a round, and those that it has at the end of it."""

    def __init__(self, config: RunConfig, folder: Path, **faults: Any) -> None:
        super().__init__(config, folder, **faults)
        self.kept, self.had = dict[tuple[str, int], int](), dict[tuple[str, int], int]()

    async def keep(self, name: str, state: OuterState) -> None:
        await super().keep(name, state)
        self.kept[name, state.round] = self.nodes[name].training.tokens_after(state)

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        self.had[name, state.round] = self.nodes[name].progress.tokens


def test_a_round_is_written_down_with_its_tokens(tmp_path: Path) -> None:
    """A site that is started again has them."""
    cluster = KeepsTokens(six(steps=10), tmp_path, fail_at={("f", 4, "forward"): "restart"})
    run(cluster.run())
    kept = {place: tokens for place, tokens in cluster.kept.items() if place in cluster.had}
    assert kept == cluster.had
    assert sum(tokens for (_, round), tokens in kept.items() if round == max(cluster.digests)) > 0


def test_the_last_iterations_of_a_run_visit_all_stages(tmp_path: Path) -> None:
    tables = six("skip").model_dump(mode="json")
    tables["pipeline"]["full_end"] = 0.5
    cluster = PipelineCluster(RunConfig.model_validate(tables), tmp_path)
    lengths: dict[int, set[int]] = {}

    def planned(_round: int, problem: Problem, plan: paths.Plan) -> None:
        lengths[_round] = {*map(len, plan.paths)}

    cluster.planned = planned  # type: ignore[method-assign]
    run(cluster.run())
    assert cluster.voted().steps == 6
    assert lengths == {2: {3}, 3: {3}, 4: {4}, 5: {4}, 6: {4}}


def test_the_joined_model_is_that_of_one_process_that_takes_the_same_steps(tmp_path: Path) -> None:
    # One site a stage, all stages: then every iteration has the same microbatches of the one data node.
    tables = config(paths="full", microbatches=2)
    cluster = PipelineCluster(tables, tmp_path)
    run(cluster.run())
    (data_node,) = (name for name, node in cluster.nodes.items() if node.stage_state.stage == 0)
    expected = trained(tables, data_node)
    np.testing.assert_allclose(cluster.joined(), expected, rtol=1e-3, atol=2e-6)
    ends = [node.whole for node in cluster.nodes.values() if node.whole is not None]
    assert [np.array_equal(end, cluster.joined()) for end in ends] == [True]


def test_a_stage_whose_holder_has_not_taken_its_last_step_yet_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pulse counts the step as soon as it is stored, and its answer names the state that it has."""
    real, refused = catch_up.fetch_state, list[str]()

    async def fetch(carrier: Any, peers: Any, wanted: Any) -> Any:
        if len(refused) < 3:
            refused.append(carrier.node)
            raise PeerLost(peers[0], "the state is not held here")
        return await real(carrier, peers, wanted)

    monkeypatch.setattr(stage_state, "fetch_state", fetch)
    cluster = PipelineCluster(config(paths="full", microbatches=2), tmp_path)
    run(cluster.run())
    assert len(refused) == 3
    ends = [node.whole for node in cluster.nodes.values() if node.whole is not None]
    assert [np.array_equal(end, cluster.joined()) for end in ends] == [True]


def test_a_round_without_a_result_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever others bring to it, it does not end a site."""
    real, failed = vote_state.advance, list[int]()

    def advance(run: RunConfig, state: OuterState, *exchanged: Any) -> OuterState:
        if state.round == 1 and len(failed) < 3:
            failed.append(state.round)
            raise ValueError("invalid literal for int()")
        return real(run, state, *exchanged)

    monkeypatch.setattr(vote_state, "advance", advance)
    cluster = PipelineCluster(config(paths="full", microbatches=2), tmp_path)
    run(cluster.run())
    assert (len(failed), cluster.voted().steps) == (3, 6)
    assert "round 2 has no result" in caplog.text


class AStranger(PipelineCluster):
    """A site with the lowest id takes part in rounds, ready with a result of its own, and sends everybody its plans."""

    taken = frozenset[str]()

    def boot(self, name: str) -> None:
        super().boot(name)
        if name == "0":
            node = self.nodes[name]
            vars(node.training)["_work"] = partial(self._lie, node)

    async def _lie(self, node: PipelineNode) -> Update:
        message = iteration_plan([0], [[0]])
        message.round, message.step, message.nodes[:] = node.rounds.coming(), self.voted().steps, ["0"]
        for other in self.names[:-1]:
            message.candidates[:], message.newcomers[:] = [other], [0]
            node.carrier.spawn(self._send(node, other, IterationPlan.FromString(message.SerializeToString())))
        await asyncio.sleep(0.5)
        return vote_state.ready(Plan.read(message, 4), Total(loss=1.0), 4)

    async def _send(self, node: PipelineNode, other: str, message: IterationPlan) -> None:
        with suppress(PeerLost):
            await node.carrier.call(other, ROUTE, message, 60.0)
            self.taken |= {other}


def test_a_site_that_lies_in_rounds_and_about_plans_stops_no_step(tmp_path: Path) -> None:
    cluster = AStranger(six(), tmp_path)
    cluster.names.append("0")
    cluster.disks["0"] = Disk()
    run(cluster.run())
    assert cluster.voted().steps == 6
    assert not cluster.taken
    assert all(len(found) == 1 for found in cluster.digests.values())
    assert {len(state.members) for state in cluster.states.values()} == {7}, "it took part"


class AForger(PipelineCluster):
    """A site that comes after the first step, without a stage, makes up the mean of any shard that it owns."""

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        if "z" not in self.names:
            self.names.append("z")
            self.disks["z"] = Disk()
            self.boot("z")
            for node in self.nodes.values():
                node.roster.add(Site(node="z"))

    def boot(self, name: str) -> None:
        super().boot(name)
        if name == "z":
            node = self.nodes[name]
            vars(node.training)["_work"] = self._wait
            vars(node.rounds._tools)["mean"] = self._forge

    async def _wait(self) -> Update:
        await asyncio.sleep(0.5)
        return vote_state.not_ready(4)

    def _forge(self, vectors: Sequence[Vector], weights: Sequence[np.float32], out: Vector) -> None:
        weighted_mean(vectors, weights, out)
        out /= 2


@pytest.mark.thorough
def test_a_site_without_a_stage_makes_up_no_mean(tmp_path: Path) -> None:
    cluster = AForger(six(steps=12), tmp_path)
    run(cluster.run())
    assert cluster.voted().steps == max(cluster.digests) == 12, "no round was empty because of it"
    assert {len(state.members) for state in cluster.states.values()} == {7}, "it took part"


class AnIdlePlanner(PipelineCluster):
    """From the third step on, `a` keeps its plans for itself."""

    def boot(self, name: str) -> None:
        super().boot(name)
        if name == "a":
            routing = self.nodes[name].training._routing
            vars(routing)["_send"] = partial(self._keep, routing._send)

    async def _keep(self, send: Callable[[IterationPlan], Awaitable[None]], message: IterationPlan) -> None:
        if message.step < 2:
            await send(message)


@pytest.mark.thorough
def test_another_site_plans_if_the_planner_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = AnIdlePlanner(six(steps=12), tmp_path)
    run(cluster.run())
    assert cluster.voted().steps == 12
    assert max(cluster.digests) <= 12 + 3, "it is tried again after one round, then after two and four"
    assert "round 3 was empty: a sent no plan" in caplog.text
    assert all(len(found) == 1 for found in cluster.digests.values())


@pytest.mark.thorough
@pytest.mark.parametrize("times", [HOPELESS - 1, 100])
def test_training_has_diverged_if_results_are_too_large_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Each time, the site before is suspected, and left out if the others can go on without it."""
    real, bad = Stage.forward, list[int]()

    def forward(self: Stage, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        if self.stage == 2 and len(bad) < times:
            bad.append(microbatch)
            return torch.full_like(x, 1e9)
        return real(self, microbatch, x)

    monkeypatch.setattr(Stage, "forward", forward)
    cluster = PipelineCluster(config(paths="full", microbatches=2), tmp_path)
    if times < HOPELESS:
        run(cluster.run())
        assert (len(bad), cluster.voted().steps) == (times, 6)
    else:
        with pytest.raises(
            PierError, match="step 1: training diverged: microbatch 0 at hop 2 is not finite or too large"
        ):
            run(cluster.run())
        assert len(bad) == HOPELESS


PHASES = ("routed", "forward", "backward", "summed", "prepared", "exchanging", "staged", "voting")


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["a", "f"])
def test_a_site_that_dies_costs_one_attempt_at_most(tmp_path: Path, victim: str, phase: str) -> None:
    cluster = PipelineCluster(six(), tmp_path, fail_at={(victim, 3, phase): "stop"})
    run(cluster.run())
    assert cluster.struck == [(victim, 3, phase)]
    assert victim not in cluster.nodes
    assert cluster.voted().steps == 6
    assert max(cluster.digests) <= 6 + 2  # the attempt under way, and one more in which it was not yet missed
    assert all(len(found) == 1 for found in cluster.digests.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", ["voting", "forward", "prepared", "committed", "saved"])
def test_a_site_that_comes_back_takes_its_stage_again(tmp_path: Path, phase: str) -> None:
    cluster = PipelineCluster(six(steps=LONG), tmp_path, fail_at={("c", 2, phase): "restart"})
    run(cluster.run())
    assert cluster.struck == [("c", 2, phase)]
    assert cluster.voted().steps == LONG
    back = cluster.nodes["c"].stage_state
    assert back.stage is not None
    assert back.version == cluster.voted().versions[back.stage]
    assert np.isfinite(cluster.joined()).all()
    assert all(len(found) == 1 for found in cluster.digests.values())


def test_the_only_site_of_a_stage_is_waited_for_where_all_stages_must_be_visited(tmp_path: Path) -> None:
    cluster = PipelineCluster(config(paths="full", microbatches=2), tmp_path, fail_at={("d", 2, "forward"): "restart"})
    run(cluster.run())
    assert cluster.voted().steps == 6
    assert np.isfinite(cluster.joined()).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["prepared", "voting", "committed", "saved"])
@pytest.mark.parametrize("round", [FULL_EVERY - 1, FULL_EVERY, FULL_EVERY + 1])
def test_the_only_site_of_a_stage_that_comes_back_has_it_to_the_bit(tmp_path: Path, round: int, phase: str) -> None:
    run_config = config(paths="full", microbatches=2)
    run_config = run_config.model_copy(update={"inner": run_config.inner.model_copy(update={"total_steps": 12})})
    calm = PipelineCluster(run_config, tmp_path / "calm")
    run(calm.run())
    cluster = PipelineCluster(run_config, tmp_path / "struck", fail_at={("d", round, phase): "restart"})
    run(cluster.run())
    assert cluster.struck == [("d", round, phase)]
    assert np.array_equal(cluster.joined(), calm.joined())


def test_planned_paths_lead_through_the_sites_that_are_left(tmp_path: Path) -> None:
    cluster = PipelineCluster(six("skip"), tmp_path, fail_at={("e", 3, "backward"): "stop"})
    run(cluster.run())
    assert cluster.voted().steps == 6
    assert {site.name for site in cluster.problems[-1].sites} == set("abcdf")


def begun_from_a_model(tmp_path: Path, **pipeline: Any) -> tuple[PipelineCluster, RunConfig]:
    """A run that begins with a model which only its founder, a, has; and the same run with those weights as its own."""
    run = config(**pipeline)
    tables = run.model_copy(update={"run": run.run.model_copy(update={"pretrained": True})})
    weights = initial_weights(run.model, SEED + 1)
    folder = hub.export(run.model, weights, tmp_path / "model", "bytes")
    Beginnings(tmp_path / "a", tables).read(folder)
    return PipelineCluster(tables, tmp_path), run


def test_the_founder_gives_the_stages_of_the_model_that_it_has(tmp_path: Path) -> None:
    cluster, tables = begun_from_a_model(tmp_path, paths="full", microbatches=2)
    run(cluster.run())
    (data_node,) = (name for name, node in cluster.nodes.items() if node.stage_state.stage == 0)
    expected = trained(tables, data_node, SEED + 1)
    np.testing.assert_allclose(cluster.joined(), expected, rtol=1e-3, atol=2e-6)


class TheFirstPlanMisses(PipelineCluster):
    """The first plan does not reach that site."""

    missed = ""

    def boot(self, name: str) -> None:
        super().boot(name)
        routing, lost = self.nodes[name].training._routing, PeerLost(self.missed, "feigned")
        tell = routing._tell

        async def told(node: str, message: Any) -> PeerLost | None:
            if node == self.missed and message.round == 1:
                return lost
            return await tell(node, message)

        routing._tell = told  # type: ignore[method-assign]


@pytest.mark.parametrize("missed", ["a", "b"])
def test_a_founder_without_a_stage_gives_stages_to_the_others(tmp_path: Path, missed: str) -> None:
    cluster, _ = begun_from_a_model(tmp_path, paths="full", microbatches=2)
    one = TheFirstPlanMisses(cluster.config, tmp_path)
    one.missed = missed
    run(one.run())
    assert one.voted().steps == 6


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", ["routed", "forward", "prepared"])
def test_a_founder_that_dies_and_comes_back_gives_what_it_gave_before(tmp_path: Path, phase: str) -> None:
    cluster, _ = begun_from_a_model(tmp_path, paths="full", microbatches=2)
    cluster.fail_at = {("a", 2, phase): "restart"}
    run(cluster.run())
    assert cluster.struck
    assert cluster.voted().steps == 6
    assert np.isfinite(cluster.joined()).all()


def test_only_the_founder_is_asked_for_what_a_stage_begins_with(tmp_path: Path) -> None:
    cluster, tables = begun_from_a_model(tmp_path, paths="full", microbatches=2)
    folder = hub.export(tables.model, initial_weights(tables.model, SEED + 2), tmp_path / "other", "bytes")
    Beginnings(tmp_path / "b", cluster.config).read(folder)  # it claims to give, too
    asked = set[str]()
    real = stage_state.holders

    async def holders(*args: Any) -> list[str]:
        found = await real(*args)
        asked.update(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_training, "holders", holders)
        run(cluster.run())
    assert asked == {"a"}


class OneIsLeftOut(PipelineCluster):
    """After the first round, d is taken for dead once."""

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        if state.round == 1:
            self.nodes[name].training._routing.suspect = "d"


def test_a_site_that_was_left_out_once_is_waited_for_until_it_has_its_stage_again(tmp_path: Path) -> None:
    cluster = OneIsLeftOut(six(), tmp_path)
    run(cluster.run())
    planned = [{site.name for site in problem.sites} for problem in cluster.problems]
    assert planned[0] == set("abcef")
    assert all(names == set("abcdef") for names in planned[1:])
    assert max(cluster.digests) == 6


class OnePauses(PipelineCluster):
    """After the second round the operator pauses a site that has a replica, and lets it go on after the fifth."""

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        if state.round in (2, 5) and name == "a":
            stages = {node.name: node.stage_state.stage for node in self.nodes.values()}
            replicas = Counter(stages.values())
            paused = next(it for it in stages if it != "a" and replicas[stages[it]] > 1)
            self.nodes[paused].orders.take(state.round, paused=state.round == 2)


@pytest.mark.thorough
def test_a_paused_site_is_planned_around_and_takes_its_stage_again(tmp_path: Path) -> None:
    cluster = OnePauses(six(steps=LONG), tmp_path)
    run(cluster.run())
    assert cluster.voted().steps == LONG
    sizes = [len(problem.sites) for problem in cluster.problems]
    assert (min(sizes), sizes[-1]) == (5, 6)
    assert np.isfinite(cluster.joined()).all()


def test_a_run_that_was_paused_before_its_first_plan_begins_with_all_its_sites(tmp_path: Path) -> None:
    cluster = PipelineCluster(config(paths="random"), tmp_path)

    async def main() -> None:
        for name in "abc":
            cluster.boot(name)
        await asyncio.sleep(5.0)
        for node in cluster.nodes.values():
            node.orders.take(1, True)
        await asyncio.sleep(15.0)
        cluster.boot("d")
        await asyncio.sleep(30.0)
        for name in "abc":
            cluster.nodes[name].orders.take(2, False)
            await asyncio.sleep(2.0)
        async with asyncio.timeout(600.0):
            await asyncio.gather(*(node.main for node in cluster.nodes.values()))

    run(main())
    assert cluster.voted().steps == 6
    assert max(cluster.digests) > 6, "a round was empty"


def trained(tables: RunConfig, data_node: str, seed: int = SEED) -> Vector:
    """The whole model after the run, by one process that takes the mean over all microbatches."""
    layout, inner = Layout.of(tables.model), tables.inner
    model = Decoder(tables.model)
    layout.load(model, initial_weights(tables.model, seed))
    parameters = dict(model.named_parameters())
    first, second = ({name: torch.zeros_like(it) for name, it in parameters.items()} for _ in range(2))
    for step in range(inner.total_steps):
        model.zero_grad(set_to_none=True)
        parts = [rows(data_node, step, place) for place in range(tables.pipeline.microbatches)]
        losses = [functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in parts]
        torch.autograd.backward(torch.stack(losses).mean())
        take_step(parameters, Moments(first, second, step), step, inner)
    flat = torch.empty(layout.length)
    layout.store(parameters, flat)
    return flat.numpy()


HANGS_AFTER, STEPS = 6, 18
"""Rounds, so that all know how long waits are."""


class OneHangs(PipelineCluster):
    """After some rounds, the next thing that a site computes takes `seconds`."""

    victim, seconds = "a", 300.0
    began = 0.0
    steps_when_over = 0

    async def committed(self, name: str, state: OuterState) -> None:
        await super().committed(name, state)
        if name == self.victim and state.round == HANGS_AFTER:
            self.nodes[name].thread.delays.append(self.seconds)
            self.began = asyncio.get_running_loop().time()
            asyncio.get_running_loop().call_later(self.seconds, self._over)

    def _over(self) -> None:
        self.steps_when_over = self.voted().steps


@pytest.mark.sample(1)
@pytest.mark.parametrize(("victim", "seconds"), [("a", 22.0), ("a", 300.0), ("f", 300.0)])
def test_the_others_go_on_and_it_comes_back_when_it_can(tmp_path: Path, victim: str, seconds: float) -> None:
    cluster = OneHangs(six(steps=STEPS), tmp_path)
    cluster.victim, cluster.seconds = victim, seconds
    run(cluster.run())
    assert cluster.voted().steps == STEPS
    assert max(cluster.digests) <= STEPS + 2
    assert all(len(found) == 1 for found in cluster.digests.values())
    back = cluster.nodes[victim].stage_state
    assert back.stage is not None
    assert back.version == cluster.voted().versions[back.stage]
    assert np.isfinite(cluster.joined()).all()
    if seconds > 100:
        assert cluster.steps_when_over == STEPS, "nobody waits for it"


def test_one_that_never_ends_is_named_and_takes_no_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = OneHangs(six(steps=STEPS), tmp_path)
    cluster.seconds = 1e6

    async def main() -> None:
        for name in cluster.names:
            cluster.boot(name)
        async with asyncio.timeout(1200.0):
            await asyncio.gather(*(node.main for name, node in cluster.nodes.items() if name != cluster.victim))

    run(main())
    assert vote_state.vote_state_of(cluster.nodes["b"].rounds.state).steps == STEPS
    assert cluster.nodes[cluster.victim].progress.phase == Phase.PHASE_PAUSED
    assert "a: has computed for 20 s without an end" in caplog.text
    assert "computing hangs: this site takes no part until it ends" in caplog.text


def test_a_stage_is_read_once_however_often_sites_ask_and_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a large stage takes longer than a site waits for a description."""
    cluster, _ = begun_from_a_model(tmp_path, paths="full", microbatches=2)
    real, reads, go = Beginnings.given, list[int](), threading.Event()

    def given(self: Beginnings, stage: int) -> OuterState | None:
        reads.append(stage)
        if len(reads) == 1:
            raise PierError("the disk fails once")
        assert go.wait(30)
        return real(self, stage)

    monkeypatch.setattr(Beginnings, "given", given)

    async def ask() -> Any:
        network = Network(1, CALM)
        here, there = network.join("a"), network.join("b")
        state = stage_state.StageState(tmp_path / "a", cluster.config)
        stage_state.StateSharing(here, cast("Any", SimpleNamespace(offer=None, prove=None)), state, 4)
        with pytest.raises(PierError):
            await there.call("a", DESCRIBE, StateRequest(stage=2), 10.0)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await there.call("a", DESCRIBE, StateRequest(stage=2), 10.0)
        go.set()
        return await there.call("a", DESCRIBE, StateRequest(stage=2), 10.0)

    assert asyncio.run(ask()).round == 0
    assert reads == [1, 1], "one that failed, and one"
