"""A pipeline of real daemons over gRPC: one is killed, the others go on, it comes back, the stages are joined."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes.run import Found, Run
from processes.site import Site

from pier_node.config.run import load
from pier_node.outer.schedule import total_rounds
from pier_node.rounds.saved_model import newest_weights
from pier_node.rounds.state_store import StateStore
from pier_node.trainer.model.initial import initial_weights

pytestmark = pytest.mark.processes

STEPS = 30
HOOK = Path(__file__).with_name("hang_hook")
INNER = {"total_steps": STEPS, "batch_size": 2, "eval_every": 0}
TABLES: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama-tiny", "layers": 3},
    "inner": INNER,
    "pipeline": {"stages": 3, "skip": 0.34, "microbatches": 4, "plan_seconds": 0.2},
}


def steps(site: Site) -> int:
    return max((int(event["inner_step"]) for event in site.events()), default=0)


def joined(run: Run) -> list[np.ndarray]:
    """The whole models that sites of the first stage have made."""
    folders = [site.folder for site in run.sites if (site.folder / "checkpoints").exists()]
    hashed = load(run.path).hash()
    return [state.anchor for it in folders if (state := StateStore(it / "checkpoints", hashed).newest_state())]


@pytest.mark.parametrize(
    ("outer", "model"),
    [
        pytest.param({"algorithm": "sync"}, {}, marks=pytest.mark.smoke),
        ({"algorithm": "diloco", "inner_steps": 4}, {"subspace": 8, "tie_embeddings": False}),
    ],
)
def test_a_pipeline_survives_a_killed_site_and_takes_it_back(
    found: Found, outer: dict[str, object], model: dict[str, object]
) -> None:
    run = found(4, outer=outer, **{**TABLES, "model": {**TABLES["model"], **model}})
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


def test_a_site_whose_computing_hangs_says_so_is_planned_around_and_can_be_stopped(found: Found) -> None:
    run = found(4, outer={"algorithm": "sync"}, **{**TABLES, "inner": {**INNER, "total_steps": 100_000}})
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    for site in run.sites:
        site.command = ["env", f"PYTHONPATH={path}", f"PIER_TEST_HANG={site.folder / 'hang'}", *site.command]
    run.start()
    victim, other = run.by_node[-1], run.by_node[0]
    victim.wait("some steps", lambda: steps(victim) >= 5)
    (victim.folder / "hang").touch()
    victim.wait("it says so", lambda: "computing hangs" in victim.output)
    before = steps(other)
    other.wait("steps without it", lambda: steps(other) >= before + 3)
    victim.be("paused")
    (victim.folder / "hang").unlink()
    victim.wait("it takes part again", lambda: steps(victim) > before + 3)
    said = victim.output.count("computing hangs")
    (victim.folder / "hang").touch()
    victim.wait("it says so again", lambda: victim.output.count("computing hangs") > said)
    assert victim.stop() == 0, "it does not wait for what does not end"
    for site in run.sites:
        site.kill()


def test_a_site_can_be_stopped_while_it_tokenizes(found: Found) -> None:
    run = found(3, outer={"algorithm": "sync"}, **TABLES)
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    for site in run.sites:
        site.command = ["env", f"PYTHONPATH={path}", f"PIER_TEST_TOKENIZE={site.folder / 'tokenize'}", *site.command]
        site.folder.mkdir(parents=True, exist_ok=True)
        (site.folder / "tokenize").touch()
    run.start()
    run.by_node[0].wait("one tokenizes", lambda: any((site.folder / "tokenizing").exists() for site in run.sites))
    busy = next(site for site in run.sites if (site.folder / "tokenizing").exists())
    assert busy.stop() == 0, "it does not wait until that is done"
    for site in run.sites:
        site.kill()
