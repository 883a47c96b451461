"""Thousands of runs under bad weather and crashes: replicas never fork, no inner step of a survivor is lost, a live
majority always gets to the end."""

from __future__ import annotations

import random

import pytest
from simulation.cluster import Cluster, digests_by_round
from simulation.network import Weather
from simulation.virtual_time import run

from pier_node.config import RunConfig
from pier_node.faults import PHASES
from pier_node.outer.quorum import has_quorum

NAMES = ["a1", "b2", "c3", "d4", "e5"]
HOURS = 3600.0


def config(sites: int, rounds: int = 4, steps: int = 4) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"sites": sites},
            "inner": {"total_steps": rounds * steps, "eval_every": 0},
            "outer": {"algorithm": "diloco", "inner_steps": steps},
        }
    )


def check(cluster: Cluster, survivors: list[str], rounds: int) -> None:
    """The invariants of a run that has ended."""
    forks = {number: found for number, found in digests_by_round(cluster).items() if len(found) > 1}
    assert not forks, f"seed {cluster.seed}: forked at {sorted(forks)}"
    finals = {cluster.nodes[name].rounds.state.digest for name in survivors}
    assert len(finals) == 1
    for name in survivors:
        node = cluster.nodes[name]
        assert node.rounds.state.round == rounds
        if name not in cluster.crashed:
            assert node.rounds.state.ledger.get(name, 0) + node.training._pending.tokens == node.trainer.steps_done


async def whole_run(cluster: Cluster, survivors: list[str], within: float = 2 * HOURS) -> bool:
    """Run until all survivors are done; False when they lawfully stand still, for want of a quorum."""
    for name in cluster.names:
        cluster.boot(name)
    try:
        await cluster.settle(survivors, within)
        return True
    except TimeoutError:
        furthest = cluster.furthest(survivors)
        assert not has_quorum(survivors, furthest.members), f"seed {cluster.seed}: a live majority stands still"
        return False
    finally:
        for name in [*cluster.nodes]:
            if not cluster.nodes[name].main.done():
                cluster.nodes[name].main.cancel()


def test_calm() -> None:
    cluster_of = {}

    async def main() -> None:
        cluster = cluster_of["it"] = Cluster(config(3), NAMES[:3], seed=1)
        assert await whole_run(cluster, NAMES[:3])
        check(cluster, NAMES[:3], 4)

    run(main())


@pytest.mark.parametrize("fate", ["stop", "restart"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "fetching"])
@pytest.mark.parametrize("victim", ["a1", "c3"])
def test_crash_at_every_phase(victim: str, phase: str, fate: str) -> None:
    async def main() -> None:
        for seed in range(8):
            cluster = Cluster(config(3), NAMES[:3], seed=seed, fail_at={(victim, 2, phase): fate})
            survivors = [name for name in cluster.names if name != victim or fate == "restart"]
            assert await whole_run(cluster, survivors)
            assert victim in cluster.crashed
            check(cluster, survivors, 4)

    run(main())


def storm(seed: int) -> Cluster:
    """A run whose size, weather and one or two crashes are drawn from the seed."""
    dice = random.Random(seed)
    names = NAMES[: dice.choice([3, 3, 4, 5])]
    weather = Weather(
        delay=dice.choice([0.01, 0.2, 1.0]),
        jitter=dice.choice([0.0, 0.5, 3.0]),
        loss=dice.choice([0.0, 0.01, 0.03]),
        repeat=dice.choice([0.0, 0.2]),
        cut_stream=dice.choice([0.0, 0.0, 0.01]),
    )
    crashes = {
        (dice.choice(names), dice.randint(2, 4), dice.choice(PHASES)): dice.choice(["stop", "restart"])
        for _ in range(dice.choice([0, 1, 1, 2]))
    }
    stopped = {node for (node, _, _), fate in crashes.items() if fate == "stop"}
    if 2 * len(stopped) >= len(names) - 1:
        crashes = dict.fromkeys(crashes, "restart")
    return Cluster(config(len(names)), names, seed, weather, crashes)


@pytest.mark.parametrize("batch", range(10))
def test_storms(batch: int) -> None:
    async def main(seed: int) -> bool:
        cluster = storm(seed)
        doomed = {node for (node, _, _), fate in cluster.fail_at.items() if fate == "stop"}
        survivors = [name for name in cluster.names if name not in doomed]
        done = await whole_run(cluster, survivors, within=5 * HOURS)
        if done:
            check(cluster, survivors, 4)
        return done

    done = [run(main(seed)) for seed in range(100 * batch, 100 * batch + 100)]
    assert sum(done) >= 95
