"""A pipeline in one process: full paths are plain training, and a stage is stepped by those who visited it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.pipeline_arms import PLAIN
from bench.pipeline_simulation import PipelineSimulation, Routes
from bench.simulation import Trainer
from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.schedule import round_plan
from pier_node.pipeline.stage import scatter
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.model.initial import initial_weights
from pier_node.trainer.replica import Replica

MICROBATCHES, SIZE, SITES = 6, 2, 9


def config(batch_size: int = SIZE, **pipeline: Any) -> RunConfig:
    section = {
        "stages": 4,
        "microbatches": MICROBATCHES,
        "memory": MICROBATCHES,
        "plan_seconds": 0.01,
        **PLAIN,
        **pipeline,
    }
    model = {"dim": 16, "layers": 6, "heads": 2, "ffn_dim": 16, "context": 16}
    inner = {"total_steps": 4, "batch_size": batch_size, "warmup_steps": 1, "lr": 1e-2, "eval_batches": 1}
    tables = {"run": {"sites": SITES, "seed": 3}, "model": {"preset": "llama-tiny", **model}, "inner": inner}
    outer = {"algorithm": "sync", "start": "none", "inner_steps": 1}
    return RunConfig.model_validate({**tables, "outer": outer, "pipeline": section})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("cache")


def test_full_paths_are_plain_training(cache: Path) -> None:
    simulation = PipelineSimulation(config(paths="full"), cache)
    whole = config(batch_size=MICROBATCHES * SIZE)
    windows = Windows(open_corpus(whole.data, 0, 1, None, cache), whole.model.context, whole.run.seed, "")
    plain = Trainer(whole, [windows], initial_weights(whole.model, whole.run.seed).numpy())
    for step in range(3):
        simulation.step(step, [(0, 1, 2, 3)] * MICROBATCHES)
        plain.train(round_plan(whole, step + 1))
        # AdamW makes a whole step of a gradient that is nearly 0, whichever its sign: so the mean.
        assert np.abs(simulation.weights() - plain.weights()).mean() < 1e-5 * (step + 1)
    assert np.abs(plain.weights() - initial_weights(whole.model, 3).numpy()).mean() > 1e-3


def test_a_stage_that_nobody_visits_stays_as_it_is(cache: Path) -> None:
    simulation = PipelineSimulation(config(), cache)
    before = simulation.weights()
    simulation.step(0, [(0, 1, 2), (0, 2, 1), (0, 2), (0, 1, 2)])
    after = simulation.weights()
    model = config().model
    changed = [stage for stage in range(4) if (scatter(model, 4, after - before, stage) != 0).any()]
    assert changed == [0, 1, 2]
    assert simulation.visits == {(0, 1, 2): 2, (0, 2, 1): 1, (0, 2): 1}


def test_the_order_of_stages_matters(cache: Path) -> None:
    one, other = (PipelineSimulation(config(), cache) for _ in range(2))
    losses = [one.step(0, [(0, 1, 2, 3)] * 2), other.step(0, [(0, 2, 1, 3)] * 2)]
    assert losses[0] != losses[1]
    assert not np.array_equal(one.weights(), other.weights())


def test_a_run_learns_and_its_model_is_the_joined_one(cache: Path) -> None:
    simulation = PipelineSimulation(config(skip=0.25), cache)
    done: list[int] = []
    curve = simulation.run(2, done.append)
    assert [point.step for point in curve] == [2, 4]
    assert curve[-1].loss < np.log(256)
    assert sum(done) == 4
    assert sum(simulation.visits.values()) == 4 * MICROBATCHES
    replica = Replica(config(), torch.device("cpu"), workers=1)
    loss = replica.evaluate(torch.from_numpy(simulation.weights()), simulation.validation)
    assert curve[-1].loss == pytest.approx(loss, rel=1e-6)


def test_the_last_steps_may_visit_all_stages(cache: Path) -> None:
    simulation = PipelineSimulation(config(skip=0.25, full_end=0.5), cache)
    simulation.run(4, lambda _: None)
    assert simulation.visits[0, 1, 2, 3] == 2 * MICROBATCHES
    assert sum(simulation.visits.values()) == 4 * MICROBATCHES


def test_chosen_steps_may_visit_all_stages(cache: Path) -> None:
    simulation = PipelineSimulation(config(skip=0.25), cache, lambda step, total: step in (1, total - 1))
    simulation.run(4, lambda _: None)
    assert simulation.visits[0, 1, 2, 3] == 2 * MICROBATCHES
    assert sum(simulation.visits.values()) == 4 * MICROBATCHES


@pytest.mark.parametrize(("paths", "again"), [("skip", True), ("random", False)])
def test_planned_paths_stay_and_random_ones_change(paths: str, again: bool) -> None:
    routes = Routes(config(paths=paths))
    first, second = routes.of(0), routes.of(1)
    assert (first == second) is again
    for it in (first, second):
        assert {len(route) for route in it} == {3}
        assert all([*route] == sorted(route) for route in it), "no swaps unless they are allowed"
        visits = Counter(stage for route in it for stage in route)
        assert [visits[stage] for stage in range(4)] == [6, 4, 4, 4]


def test_swaps_are_planned_where_they_are_allowed() -> None:
    tables = config(stages=6, skip=0.33, swaps=1)
    routes = Routes(tables).of(0)
    assert any([*route] != sorted(route) for route in routes)
    assert Routes(tables).of(0) == routes, "a seed gives the same paths"


def apart(sites: int, codec: str = "none", **outer: Any) -> RunConfig:
    """Two stages, and an outer step after every second one."""
    tables = config(stages=2, paths="random").model_dump(mode="json")
    tables["run"]["sites"] = sites
    tables["outer"] = {"algorithm": "diloco", "inner_steps": 2, "codec": codec, **outer}
    return RunConfig.model_validate(tables)


def weights_after(tables: RunConfig, cache: Path) -> Vector:
    simulation = PipelineSimulation(tables, cache)
    simulation.run(4, lambda _: None)
    assert sum(simulation.visits.values()) == simulation.visits[0, 1] == 4 * MICROBATCHES
    return simulation.weights()


def test_an_outer_step_of_one_replica_that_is_the_identity_changes_nothing(cache: Path) -> None:
    together = weights_after(apart(2, algorithm="sync", inner_steps=1), cache)
    np.testing.assert_allclose(weights_after(apart(2, momentum=0.0, lr=1.0), cache), together, rtol=1e-4, atol=1e-6)


def test_replicas_that_step_apart_end_elsewhere_and_a_codec_moves_them_little(cache: Path) -> None:
    first = initial_weights(config().model, 3).numpy()
    together, plain, coded = (
        weights_after(it, cache) for it in (apart(4, algorithm="sync", inner_steps=1), apart(4), apart(4, "int4"))
    )
    off, moved = np.linalg.norm(coded - plain), np.linalg.norm(plain - first)
    assert 0 < off < 0.1 * moved
    assert np.linalg.norm(plain - together) > off
