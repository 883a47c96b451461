"""Thousands of runs under bad weather and crashes: replicas never fork, no inner step of a survivor is lost, a live
majority always gets to the end."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from simulation.cluster import Cluster, digests_by_round
from simulation.faults import BATCH, storms
from simulation.network import Weather
from simulation.virtual_time import run

from pier_node.base.faults import PHASES
from pier_node.config.run import RunConfig
from pier_node.outer.schedule import entry, total_rounds
from pier_node.rounds.quorum import has_quorum

NAMES = ["a1", "b2", "c3", "d4", "e5"]
HOURS = 3600.0


def config(sites: int, witness: bool = False, **outer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"sites": sites, "witness": witness},
            "inner": {"total_steps": 16, "eval_every": 0},
            "outer": {"algorithm": "diloco", "inner_steps": 4, **outer},
        }
    )


def check(cluster: Cluster, survivors: list[str]) -> None:
    """The invariants of a run that has ended."""
    forks = {number: found for number, found in digests_by_round(cluster).items() if len(found) > 1}
    assert not forks, f"seed {cluster.seed}: forked at {sorted(forks)}"
    finals = {cluster.nodes[name].rounds.state.digest for name in survivors}
    assert len(finals) == 1
    for name in survivors:
        node = cluster.nodes[name]
        assert node.rounds.state.round == total_rounds(cluster.config)
        for fragment, tokens in enumerate(node.training._unsent.tokens):
            if name not in cluster.crashed:
                taken = node.rounds.state.ledger.get(entry(name, fragment), 0)
                assert taken + tokens == node.trainer.steps_done, f"seed {cluster.seed}: {name} lost steps"


async def whole_run(cluster: Cluster, survivors: list[str], within: float = 2 * HOURS) -> bool:
    """Run until all survivors are done; False when they lawfully stand still, for want of a quorum."""
    for name in cluster.names:
        cluster.boot(name)
    try:
        await cluster.settle(survivors, within)
        return True
    except TimeoutError:
        assert not has_quorum(survivors, cluster.base(survivors)), f"seed {cluster.seed}: a live majority stands still"
        return False
    finally:
        for name in [*cluster.nodes]:
            if not cluster.nodes[name].main.done():
                cluster.nodes[name].main.cancel()


def test_calm() -> None:
    async def main() -> None:
        cluster = Cluster(config(3), NAMES[:3], seed=1)
        assert await whole_run(cluster, NAMES[:3])
        check(cluster, NAMES[:3])

    run(main())


WAYS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"fragments": 2},
    {"overlap": True, "fragments": 4, "codec": "int8"},
]


@pytest.mark.sample(14)
@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("fate", ["stop", "restart"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "fetching"])
@pytest.mark.parametrize("victim", ["a1", "c3"])
def test_crash_at_every_phase(victim: str, phase: str, fate: str, ways: dict[str, Any]) -> None:
    async def main() -> None:
        for seed in range(3):
            cluster = Cluster(config(3, **ways), NAMES[:3], seed=seed, fail_at={(victim, 2, phase): fate})
            survivors = [name for name in cluster.names if name != victim or fate == "restart"]
            assert await whole_run(cluster, survivors)
            assert victim in cluster.crashed
            check(cluster, survivors)

    run(main())


def storm(seed: int) -> Cluster:
    """A run whose size, weather and one or two crashes are drawn from the seed."""
    dice = random.Random(seed)
    names = NAMES[: dice.choice([3, 3, 4, 5])]
    weather = Weather.drawn(dice)
    crashes = {
        (dice.choice(names), dice.randint(2, 4), dice.choice(PHASES)): dice.choice(["stop", "restart"])
        for _ in range(dice.choice([0, 1, 1, 2]))
    }
    stopped = {node for (node, _, _), fate in crashes.items() if fate == "stop"}
    if 2 * len(stopped) >= len(names) - 1:
        crashes = dict.fromkeys(crashes, "restart")
    overlap, fragments, codec = dice.random() < 0.5, dice.choice([1, 2, 4]), dice.choice(["none", "int8"])
    run_config = config(len(names), overlap=overlap, fragments=fragments, codec=codec)
    return Cluster(run_config, names, seed, weather, crashes)


def weathered(seed: int) -> bool:
    """Whether a storm was survived to the end; if it was, all invariants held."""

    async def main() -> bool:
        cluster = storm(seed)
        doomed = {node for (node, _, _), fate in cluster.fail_at.items() if fate == "stop"}
        survivors = [name for name in cluster.names if name not in doomed]
        done = await whole_run(cluster, survivors, within=5 * HOURS)
        if done:
            check(cluster, survivors)
        return done

    return run(main())


@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", range(0, storms(120), BATCH))
def test_storms(batch: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    done = [weathered(seed) for seed in range(batch, batch + BATCH)]
    assert sum(done) >= 0.9 * BATCH


@pytest.mark.sample(6)
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "fetching"])
@pytest.mark.parametrize("victims", [("a1",), ("b2",), ("a1", "b2"), ("c3", "d4")], ids="".join)
def test_half_of_the_sites_go_on_with_the_vote_of_the_witness(victims: tuple[str, ...], phase: str) -> None:
    async def main(seed: int) -> None:
        names = NAMES[: 2 * len(victims)]
        fates = {(victim, 2, phase): "stop" for victim in victims}
        cluster = Cluster(config(len(names), witness=True), names, seed, fail_at=fates)
        survivors = [name for name in names if name not in victims]
        assert await whole_run(cluster, survivors)
        check(cluster, survivors)

    for seed in range(3):
        run(main(seed))


def storm_with_witness(seed: int) -> tuple[Cluster, list[str]]:
    """Two or four sites, of which up to half die for good and others come back; and those that stay."""
    dice = random.Random(seed)
    names = NAMES[: dice.choice([2, 2, 4])]
    doomed = dice.sample(names, dice.randint(0, len(names) // 2))
    fates = {(name, dice.randint(2, 4), dice.choice(PHASES)): "stop" for name in doomed}
    back = {(dice.choice(names), dice.randint(2, 4), dice.choice(PHASES)): "restart" for _ in range(dice.randint(0, 2))}
    run_config = config(len(names), True, overlap=dice.random() < 0.5, codec=dice.choice(["none", "int8"]))
    cluster = Cluster(run_config, names, seed, Weather.drawn(dice), {**back, **fates})
    return cluster, [name for name in names if name not in doomed]


@pytest.mark.sample(1)
@pytest.mark.parametrize("batch", range(0, storms(120), BATCH))
def test_storms_with_a_witness(batch: int, caplog: pytest.LogCaptureFixture) -> None:
    """No fork ever. Some stand still: a dead site has the vote of the witness or the only copy of a result, or most
    members of the last round are dead."""
    caplog.set_level(logging.CRITICAL)

    async def main(seed: int) -> bool:
        cluster, survivors = storm_with_witness(seed)
        done = await whole_run(cluster, survivors, within=5 * HOURS)
        if done:
            check(cluster, survivors)
        else:
            assert not [found for found in digests_by_round(cluster).values() if len(found) > 1]
        return done

    assert sum(run(main(seed)) for seed in range(batch, batch + BATCH)) >= 0.7 * BATCH


@pytest.mark.parametrize("ways", [{"codec": "int4"}, {"codec": "int8", "fragments": 2, "overlap": True}], ids=str)
def test_who_missed_rounds_takes_their_steps_from_the_means(
    ways: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Restarted in the middle of a run: no piece of a state has to travel, and the bits are the others'."""
    caplog.set_level(logging.INFO, "pier_node.rounds.catch_up")

    async def main(seed: int) -> None:
        cluster = Cluster(config(3, **ways), NAMES[:3], seed, fail_at={("c3", 2, "exchanging"): "restart"})
        assert await whole_run(cluster, NAMES[:3])
        check(cluster, NAMES[:3])

    for seed in range(10):
        run(main(seed))
    assert "took the outer steps of the rounds" in caplog.text
