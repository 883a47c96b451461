"""A replica whose own steps went astray: it computes with what it holds, also if the outer round moves nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pipeline.cases import config
from pipeline.cluster import PipelineCluster
from simulation.virtual_time import run
from torch import Tensor

from pier_node.base.shared import Vector
from pier_node.config.run import RunConfig
from pier_node.outer.state import OuterState
from pier_node.pipeline.stage import Stage

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
