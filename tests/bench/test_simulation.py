from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.simulation import PairSimulation, Point, Simulation, Sites, Trainer, ddp_bytes, simulation_of
from pier_node.config.run import RunConfig
from pier_node.outer.codec import CODECS
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import round_plan
from pier_node.trainer.data.corpus import Windows, open_corpus
from pier_node.trainer.data.sources import FAMILIES
from pier_node.trainer.model.initial import initial_weights

STEPS, EVERY = 24, 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def config(sites: int, seed: int = 1, **outer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"sites": sites, "seed": seed},
            "model": {"preset": "llama-tiny", "dim": 16, "layers": 1, "ffn_dim": 16, "context": 16},
            "inner": {"total_steps": STEPS, "batch_size": 2, "warmup_steps": 2, "lr": 1e-2, "eval_batches": 1},
            "outer": {"inner_steps": EVERY, **outer},
        }
    )


def simulate(cache: Path, **outer: Any) -> tuple[Simulation, list[Point]]:
    simulation = simulation_of(config(**outer), cache)
    return simulation, simulation.run(EVERY, lambda _: None)


def test_start_is_plain_synchronous_training(cache: Path) -> None:
    _, sync = simulate(cache, sites=2, algorithm="sync", start="none")
    _, pier = simulate(cache, sites=2, algorithm="pier", start="sync", start_fraction=0.5)
    assert pier[:3] == sync[:3], "bit-identical through the start"
    assert pier[3:] != sync[3:]


def test_one_site_with_the_identity_as_outer_step_is_synchronous_training(cache: Path) -> None:
    _, sync = simulate(cache, sites=1, algorithm="sync", start="none")
    _, diloco = simulate(cache, sites=1, algorithm="diloco", momentum=0.0, lr=1.0)
    np.testing.assert_allclose([point.loss for point in diloco], [point.loss for point in sync], rtol=1e-4)


def test_momentum_warmup_is_the_sum_of_decayed_movements(cache: Path) -> None:
    simulation = Simulation(config(2, algorithm="pier", start="sync", start_fraction=0.99), cache)
    anchors: list[np.ndarray[Any, Any]] = [simulation.anchor]
    simulation.run(STEPS, lambda _: anchors.append(simulation.anchor))
    marks = anchors[::EVERY]
    expected = np.zeros_like(marks[0], dtype=np.float64)
    for before, after in pairwise(marks):
        expected = 0.9 * expected + (before - after)
    np.testing.assert_allclose(simulation.momentum, expected, atol=1e-6)


def test_training_learns_and_seeds_differ(cache: Path) -> None:
    _, first = simulate(cache, sites=2, algorithm="pier", start="sync")
    _, second = simulate(cache, sites=2, seed=2, algorithm="pier", start="sync")
    assert [point.step for point in first] == list(range(EVERY, STEPS + 1, EVERY))
    assert first != second
    assert first[-1].loss < first[0].loss < np.log(256) + 0.1


def in_pairs(cache: Path, sites: int, **outer: Any) -> tuple[PairSimulation, list[Point]]:
    simulation, curve = simulate(cache, sites=sites, algorithm="noloco", **outer)
    assert isinstance(simulation, PairSimulation)
    return simulation, curve


def test_two_sites_in_pairs_are_diloco_with_heavy_ball(cache: Path) -> None:
    """Without momentum it is DiLoCo's own step (arXiv 2506.10911)."""
    pairs, curve = in_pairs(cache, 2, noloco={"alpha": 0.0, "beta": 0.7, "gamma": 0.7})
    _, diloco = simulate(cache, sites=2, algorithm="diloco", momentum=0.0, lr=0.7)
    assert pairs.spreads == [0.0] * (STEPS // EVERY)
    np.testing.assert_allclose([point.loss for point in curve], [point.loss for point in diloco], rtol=1e-5)


@pytest.mark.parametrize("outer", [{"codec": "int8"}, {"overlap": True}, {"codec": "int4", "overlap": True}])
def test_pairs_with_codec_and_overlap_learn_what_pairs_do(cache: Path, outer: dict[str, Any]) -> None:
    plain, expected = in_pairs(cache, 2)
    pairs, curve = in_pairs(cache, 2, **outer)
    assert curve != expected
    assert curve[-1].loss == pytest.approx(expected[-1].loss, rel=0.05)
    assert (pairs.sent < plain.sent / 3) == ("codec" in outer)
    assert pairs.spreads[-1] == 0.0, "both take the same step"


def test_four_sites_in_pairs_stay_close(cache: Path) -> None:
    pairs, curve = in_pairs(cache, 4)
    assert curve[-1].loss < curve[0].loss
    assert 0 < pairs.spreads[-1] < 0.02
    assert pairs.merged_loss() < curve[-1].loss + 0.05


def test_a_solo_start_before_pairs_is_plain_synchronous_training(cache: Path) -> None:
    _, sync = simulate(cache, sites=3, algorithm="sync", start="none")
    _, pairs = in_pairs(cache, 3, start="solo", start_fraction=0.5)
    assert pairs[:3] == sync[:3]
    assert pairs[3:] != sync[3:]


def test_sites_in_one_batch_are_sites_one_by_one(cache: Path) -> None:
    plans = [round_plan(config(3), number) for number in (1, 2, 3)]
    windows = [Windows(open_corpus(config(3).data, slot, 3, None, cache), 16, 1, f"site-{slot}") for slot in range(3)]
    weights = initial_weights(config(3).model, 1).numpy()
    alone = [Trainer(config(3), [each], weights) for each in windows]
    together = Sites(config(3), windows, Trainer(config(3), [], weights).replica)
    for plan in plans:
        together.train(plan)
        for trainer in alone:
            trainer.train(plan)
    for found, trainer in zip(together.weights(), alone, strict=True):
        np.testing.assert_allclose(found, trainer.weights(), atol=1e-5)
        assert np.abs(found - weights).mean() > 1e-2
    together.load([weights] * 3)
    assert all((found == weights).all() for found in together.weights())


def test_sites_on_domains_of_their_own(cache: Path) -> None:
    simulation = simulation_of(config(2, algorithm="diloco"), cache, FAMILIES)
    assert simulation.run(EVERY, lambda _: None)[-1].loss < np.log(256)


def test_what_a_site_sends(cache: Path) -> None:
    """Half of the vector twice in each of three rounds; a state of 8 bytes a weight to one of two sites."""
    length = Layout.of(config(2).model).length
    assert ddp_bytes(config(2)) == STEPS * 4 * length
    sync, _ = simulate(cache, sites=2, algorithm="sync", start="none")
    assert sync.sent == STEPS * 4 * length
    ours, _ = simulate(cache, sites=2, algorithm="diloco", codec="int4", start="solo", start_fraction=0.5)
    assert ours.sent == 3 * CODECS["int4"].size(length) + 4 * length
    pairs, _ = simulate(cache, sites=3, algorithm="noloco", noloco={"gamma": 0.3})
    assert pairs.sent == 6 * 8 * length * 2 / 3


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("landing", [1.0, 0.5])
def test_whenever_results_land_one_site_is_plain_training(cache: Path, fragments: int, landing: float) -> None:
    _, sync = simulate(cache, sites=1, algorithm="sync", start="none")
    plain: dict[str, Any] = {"algorithm": "diloco", "momentum": 0.0, "lr": 1.0, "overlap": True, "fragments": fragments}
    curve = Simulation(config(1, **plain), cache, landing=landing).run(EVERY, lambda _: None)
    assert curve[-1].loss == pytest.approx(sync[-1].loss, rel=1e-4)


def test_results_that_land_early_change_what_several_sites_learn(cache: Path) -> None:
    early, late = (Simulation(config(2, algorithm="diloco", overlap=True), cache, landing=part) for part in (0.5, 1.0))
    assert early.run(EVERY, lambda _: None) != late.run(EVERY, lambda _: None)
