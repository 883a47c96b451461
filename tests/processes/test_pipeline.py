"""A pipeline of real daemons over gRPC: one is killed, the others go on, it comes back, the stages are joined."""

from __future__ import annotations

import numpy as np
import pytest
from processes.run import Found, Run
from processes.site import Site

from pier_node.checkpoint import CheckpointStore
from pier_node.commands.weights import newest_weights
from pier_node.config import load
from pier_node.model.initial import initial_weights
from pier_node.outer.schedule import total_rounds

pytestmark = pytest.mark.processes

STEPS = 30
TABLES = {
    "model": {"preset": "llama-tiny", "layers": 3},
    "inner": {"total_steps": STEPS, "batch_size": 2, "eval_every": 0},
    "pipeline": {"stages": 3, "skip": 0.34, "microbatches": 4, "plan_seconds": 0.2},
}


def steps(site: Site) -> int:
    return max((int(event["inner_step"]) for event in site.events()), default=0)


def joined(run: Run) -> list[np.ndarray]:
    """The whole models that sites of the first stage have made."""
    folders = [site.folder for site in run.sites if (site.folder / "checkpoints").exists()]
    hashed = load(run.path).hash()
    return [state.anchor for it in folders if (state := CheckpointStore(it / "checkpoints", hashed).newest_state())]


@pytest.mark.parametrize("outer", [{"algorithm": "sync"}, {"algorithm": "diloco", "inner_steps": 4}])
def test_a_pipeline_survives_a_killed_site_and_takes_it_back(found: Found, outer: dict[str, object]) -> None:
    run = found(4, outer=outer, **TABLES)
    run.start()
    victim = run.by_node[-1]
    victim.wait("some steps", lambda: steps(victim) >= 5)
    victim.kill()
    before = steps(run.by_node[0])
    run.by_node[0].wait("steps without it", lambda: steps(run.by_node[0]) >= before + 3)
    victim.start()
    for site in run.sites:
        assert site.ended() == 0, f"{site} failed"
    assert {steps(site) for site in run.sites} == {STEPS}
    assert max(event["round"] for event in run.by_node[0].events()) <= total_rounds(load(run.path)) + 4, (
        "more than one attempt or two was lost"
    )
    models = joined(run)
    assert models
    assert all(np.array_equal(models[0], other) for other in models)
    first = initial_weights(load(run.path).model, 1).numpy()
    assert np.abs(models[0] - first).max() > 1e-3
    holder = next(site.folder for site in run.sites if (site.folder / "checkpoints").exists())
    assert len(newest_weights(holder).flat) == len(first)
