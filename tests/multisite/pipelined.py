"""A pipeline of real sites on links of their own, and what its tests want to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from multisite.harm import slowed
from multisite.world import World
from processes.run import ENDLESS
from processes.site import PATIENCE, Site, wait_until

from bench.pipeline_figures import stepped
from pier_node.pipeline import vote_state
from pier_node.pipeline.paths_file import PATHS_FILE, Drawn, read_paths
from pier_node.pipeline.stage_state import StageState
from pier_node.rounds.state_store import StateStore
from pier_node.site.pipeline import VOTE_STATES

FIVE = {"a": 100.0, "b": 50.0, "c": 30.0, "d": 50.0, "e": 50.0}
"""Uplinks in Mbit/s, of sites for three stages: 2, 2 and 1 of them."""
STARTING = 300.0
"""Seconds for five sites and a coordinator that import PyTorch all at once, on a busy machine of two cores."""
TABLES: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama-tiny", "layers": 3},
    "inner": {**ENDLESS, "batch_size": 8, "eval_every": 0, "warmup_steps": 1, "lr": 0.003},
    "outer": {"algorithm": "sync"},
    "pipeline": {"stages": 3, "skip": 0.34, "microbatches": 6, "plan_seconds": 0.3},
}
"""Replicas average at every step: each round is an iteration."""


def steps(site: Site) -> int:
    """That the run has taken, as far as a site knows."""
    return max((int(event["inner_step"]) for event in site.events()), default=0)


def worked(site: Site) -> int:
    """Iterations in which a site took part itself, and which counted."""
    return len(stepped(site.events()))


def empty(site: Site, since: int) -> int:
    """Rounds after that one in which no step was taken, of those that a site saw."""
    events = [event for event in site.events() if event["round"] >= since]
    return int(events[-1]["round"] - events[0]["round"] - (events[-1]["inner_step"] - events[0]["inner_step"]))


def begin(run: World) -> None:
    """Start all, and wait for the first iterations."""
    run.start()
    take_steps(run, more=3, within=STARTING)


def take_steps(run: World, *names: str, more: int = 2, within: float = PATIENCE) -> None:
    """Wait until these sites, or all, took part in some more iterations that counted."""
    sites = [run[name] for name in names or run.sites]
    before = {site.name: worked(site) for site in sites}
    for site in sites:
        site.wait(f"{more} more iterations", lambda site=site: worked(site) >= before[site.name] + more, within)  # type: ignore[misc]


def drawn(run: World) -> Drawn:
    """The paths that were planned last, with names."""
    found = [site.folder / PATHS_FILE for site in run.sites.values() if (site.folder / PATHS_FILE).exists()]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    return read_paths(newest, {site.node: name for name, site in run.sites.items()})


def visits(run: World, name: str) -> int:
    """How often microbatches come to a site, as planned last."""
    it = drawn(run)
    return sum(it.problem.sites[site].name == name for path in it.plan.paths for site in path)


def expendable(run: World) -> Site:
    """A site that has a replica and does not plan: of a later stage, and the one with most to do."""
    wait_until("paths are planned", lambda: any((it.folder / PATHS_FILE).exists() for it in run.sites.values()))
    planner = min(run.sites.values(), key=lambda site: site.node)
    several = [it for it in run.sites.values() if it is not planner and _stage(run, it) and _replicas(run, it)]
    return max(several, key=lambda site: visits(run, site.name))


@contextmanager
def needed(run: World, site: Site) -> Iterator[None]:
    """Microbatches come to it, for its replicas are slow. If only links are the limit, one of them may do it all."""
    with ExitStack() as stack:
        for replica in _replicas(run, site):
            stack.enter_context(slowed(replica, 0.2))
        yield


def _stage(run: World, site: Site) -> int | None:
    return StageState(site.folder, run.config).stage


def _replicas(run: World, site: Site) -> list[Site]:
    return [it for it in run.sites.values() if it is not site and _stage(run, it) == _stage(run, site)]


def loss_falls(run: World) -> None:
    """From the first steps to the last ones."""
    losses = [event["loss"] for event in next(iter(run.sites.values())).events() if event["loss"] is not None]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def replicas_are_equal(run: World) -> None:
    """Kill all; sites of a stage have the same bits of it on their disks."""
    run.kill()
    config, held = run.config, dict[int, list[StageState]]()
    voted = [StateStore(site.folder / VOTE_STATES, config.hash()).newest_state() for site in run.sites.values()]
    versions = min((vote_state.vote_state_of(state) for state in voted if state), key=lambda it: it.steps).versions
    for site in run.sites.values():
        stage_state = StageState(site.folder, config)
        assert stage_state.stage is not None
        assert stage_state.load(versions[stage_state.stage]), f"{site} has not the version that counts"
        held.setdefault(stage_state.stage, []).append(stage_state)
    assert sorted(len(vaults) for vaults in held.values()) == [1, 2, 2]
    for vaults in held.values():
        states = [stage_state.state for stage_state in vaults if stage_state.state]
        for name in states[0].tensors:
            assert all(np.array_equal(states[0].tensors[name].array, it.tensors[name].array) for it in states)
