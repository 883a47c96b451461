"""Sites of a pipeline that die at the worst moment, are cut off or slow: no hang, no corrupt step, little lost."""

from __future__ import annotations

import pytest
from multisite.harm import slowed
from multisite.pipelined import (
    FIVE,
    TABLES,
    begin,
    drawn,
    empty,
    expendable,
    loss_falls,
    needed,
    replicas_are_equal,
    take_steps,
    visits,
)
from multisite.test_deaths import KILLED
from multisite.world import MakeWorld
from processes.site import wait_until

pytestmark = pytest.mark.multisite

FAULTS = ("forward", "backward", "averaging", "prepared")
"""Where the site dies; averaging: of the gradients of replicas; prepared: the step is on its disk and was not told."""


def test_a_site_that_dies_anywhere_in_an_iteration_costs_one_at_most(world: MakeWorld) -> None:
    run = world(FIVE, coordinator=True, **TABLES)
    begin(run)
    victim = expendable(run)
    others = [name for name in FIVE if name != victim.name]
    for phase in FAULTS:
        victim.kill()
        take_steps(run, *others)
        before = run[others[0]].round
        victim.start("--fail-at", f"1:{phase}")
        with needed(run, victim):
            assert victim.ended() in KILLED
        take_steps(run, *others)
        assert empty(run[others[0]], before) <= 1, phase
    victim.start()
    take_steps(run)
    assert any(f"paths over {len(others)} sites, planned again" in site.output for site in run.sites.values())
    for text in (f"{victim} does not answer", "is tried again"):
        wait_until("the operator hears of it", lambda text=text: run.told(text))  # type: ignore[misc]
    loss_falls(run)
    replicas_are_equal(run)


@pytest.mark.alone  # paths are planned by the speeds that are measured
def test_a_site_that_is_slow_or_cut_off_is_planned_around(world: MakeWorld) -> None:
    # Deep stages: computing takes its share of an iteration, and a task longer than the rests of a slowed site.
    deep = {"model": {**TABLES["model"], "layers": 12}, "inner": {**TABLES["inner"], "batch_size": 48}}
    run = world(FIVE, coordinator=True, **{**TABLES, **deep})
    begin(run)
    victim = expendable(run)
    others = [name for name in FIVE if name != victim.name]
    with needed(run, victim):
        wait_until("microbatches come to it", lambda: visits(run, victim.name) > 0)
    usual = max(visits(run, victim.name), 1)  # the paths may just have changed
    with slowed(victim, 0.2):
        wait_until("fewer microbatches come to it", lambda: visits(run, victim.name) < usual)
        take_steps(run)
    before = run[others[0]].round
    run.cut(victim.name)
    take_steps(run, *others)
    assert empty(run[others[0]], before) <= 1
    assert victim.name not in {site.name for site in drawn(run).problem.sites}
    wait_until("the operator hears of it", lambda: run.told(f"{victim.name} is silent"))
    run.heal()
    take_steps(run)
    loss_falls(run)
    replicas_are_equal(run)
