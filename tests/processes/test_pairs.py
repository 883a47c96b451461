"""NoLoCo between real sites: nobody but its partner waits for a site that stands still, and only for a while."""

from __future__ import annotations

from typing import Any

import pytest
from processes.run import Found, held
from processes.site import Site

pytestmark = pytest.mark.processes

ROUNDS = 60
TABLES: dict[str, dict[str, Any]] = {
    "inner": {"total_steps": 20 * ROUNDS},
    "outer": {"algorithm": "noloco", "inner_steps": 20},
}
TIMEOUT = 10.0
"""Seconds that a partner may be silent, at least; half of that until it has come (gossip/)."""
NOISE = 4.0
"""Seconds that a round may take on a busy machine of two cores, five sites on it, without anybody being waited for."""


def waits(site: Site, first: int) -> list[float]:
    """Seconds in each outer round from this one on."""
    return [event["round_seconds"] for event in site.events() if event["round"] >= first]


def has_met(site: Site, at: int) -> bool:
    return any(len(event["members"]) == 2 for event in site.events()[at:])


def test_one_that_stands_still_and_one_that_dies_hold_up_only_their_partners(found: Found) -> None:
    run = found(5, **TABLES)
    run.start()
    stopped, killed, *others = run.sites
    for site in run.sites:
        site.reach(12)
    at, before = max(site.round for site in others), len(stopped.events())
    stopped.hold()
    stopped.daemon.suspend()
    for site in others:
        site.reach(at + 3)
    stopped.daemon.resume()
    stopped.release()
    stopped.wait("meets somebody again", lambda: has_met(stopped, before + 1))
    killed.kill()
    for site in (stopped, *others):
        assert site.ended() == 0
    for site in others:
        long = [seconds for seconds in waits(site, at) if seconds > NOISE]
        assert max(waits(site, at)) < TIMEOUT + NOISE
        assert len(long) <= 4, f"{site}: it waited for somebody again and again: {long}"
    for site in (stopped, *others):
        assert site.events()[-1]["round"] == ROUNDS
        assert site.events()[-1]["spread"] > 0
        assert site.events()[-1]["validation_loss"] < 4.0


def test_sites_come_and_go_and_come_back(found: Found) -> None:
    run = found(2, **TABLES)
    run.start()
    for site in run.sites:
        site.reach(5)
    late = run.add("late")
    with held(run.sites[:2]):
        late.start()
        late.take_part()
    late.wait("meets somebody", lambda: has_met(late, 0))
    first = run.sites[0]
    assert first.stop() == 0
    with held([run.sites[1], late]):
        first.start()
        first.take_part()
    first.rejoin()
    run.finish()
    assert all(site.events()[-1]["round"] == ROUNDS for site in run.sites)
    assert max(event["mean_spread"] or 0.0 for event in late.events()) > 0


def test_all_end_with_one_model_when_it_is_wanted(found: Found) -> None:
    run = found(3, inner={"total_steps": 200, "eval_every": 0}, outer={**TABLES["outer"], "final_merge": True})
    run.start()
    for site in run.sites:
        assert site.ended() == 0
    before, after = ([site.events()[place] for site in run.sites] for place in (-2, -1))
    assert len({event["digest"] for event in before}) == 3, "different until then"
    assert len({event["digest"] for event in after}) == 1
    assert all(len(event["members"]) == 3 for event in after)
    losses = [event["validation_loss"] for event in before]
    for event in after:
        assert event["members_loss"] == pytest.approx(sum(losses) / 3)
        assert event["validation_loss"] < max(losses) + 0.1
    assert "3 models are merged: validation loss" in run.sites[0].output
