"""A site that lives and whose computing hangs: it says so itself, and the others go on without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from pipeline.cluster import PipelineCluster
from pipeline.test_training import six
from simulation.virtual_time import run

from pier_node.outer.state import OuterState
from pier_node.pipeline import vote_state
from pier_proto.v1.peer_pb2 import Phase

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
        self.steps_when_over = self.standing().steps


@pytest.mark.parametrize(("victim", "seconds"), [("a", 22.0), ("a", 300.0), ("f", 300.0)])
def test_the_others_go_on_and_it_comes_back_when_it_can(tmp_path: Path, victim: str, seconds: float) -> None:
    cluster = OneHangs(six(steps=STEPS), tmp_path)
    cluster.victim, cluster.seconds = victim, seconds
    run(cluster.run())
    assert cluster.standing().steps == STEPS
    assert max(cluster.digests) <= STEPS + 2
    assert all(len(found) == 1 for found in cluster.digests.values())
    back = cluster.nodes[victim].stage_state
    assert back.stage is not None
    assert back.version == cluster.standing().versions[back.stage]
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
    assert vote_state.standing(cluster.nodes["b"].rounds.state).steps == STEPS
    assert cluster.nodes[cluster.victim].progress.phase == Phase.PHASE_PAUSED
    assert "a: has computed for 20 s without an end" in caplog.text
    assert "computing hangs: this site takes no part until it ends" in caplog.text
