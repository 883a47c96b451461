"""Sites of several workers, and workers that die."""

from __future__ import annotations

import pytest
from processes.run import Found

pytestmark = pytest.mark.processes


def test_two_workers_and_one_agree_and_outlive_a_killed_worker(found: Found) -> None:
    run = found(2, inner={"total_steps": 40 * 20, "batch_size": 4}, outer={"inner_steps": 20, "adaptive_steps": False})
    two, one = run.sites
    two.start("--workers", "2")
    one.start("--workers", "1")
    two.reach(3)
    assert (len(two.workers()), len(one.workers())) == (2, 1)
    for site in (two, one):
        site.be("training")
        site.workers()[-1].kill()
        site.reach(site.round + 3)
    run.finish()
    for site in run.sites:
        assert site.output.count("a worker died") == 1
        assert [event["round"] for event in site.events()] == list(range(1, 41))
        assert all(len(event["members"]) == 2 for event in site.events())
    assert two.digests() == one.digests()
    last = [site.events()[-1] for site in run.sites]
    assert last[0]["tokens_in_anchor"] == sum(event["tokens"] for event in last) == 2 * 40 * 20 * 4 * 64
