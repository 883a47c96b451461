"""Sites of unequal speed: what a slow one costs the others, with steps in proportion to speed and without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from simulation.cluster import Cluster
from simulation.test_rounds import NAMES, check
from simulation.virtual_time import run

from pier_node.config.run import RunConfig


def seconds_to_the_end(paces: list[float], **outer: Any) -> float:
    """Virtual seconds that the fastest site takes for 800 inner steps in 40 rounds; `paces` are seconds a step."""
    settings = {
        "run": {"sites": len(paces)},
        "inner": {"total_steps": 800, "eval_every": 0},
        "outer": {"algorithm": "diloco", "inner_steps": 20, **outer},
    }

    async def main() -> float:
        cluster = Cluster(RunConfig.model_validate(settings), NAMES[: len(paces)], seed=1)
        cluster.paces = dict(zip(cluster.names, paces, strict=True))
        for name in cluster.names:
            cluster.boot(name)
            cluster.nodes[name].trainer.noise = 0.1
        await cluster.settle(cluster.names, within=1e6)
        check(cluster, cluster.names)
        return asyncio.get_running_loop().time()

    return run(main())


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", [False, True])
def test_a_site_at_a_quarter_of_the_speed_costs_the_others_little(overlap: bool) -> None:
    alike = seconds_to_the_end([1.0, 1.0, 1.0], overlap=overlap)
    assert seconds_to_the_end([1.0, 1.0, 4.0], overlap=overlap) < 1.1 * alike
    assert seconds_to_the_end([1.0, 1.0, 4.0], overlap=overlap, adaptive_steps=False) > 1.15 * alike
