"""Sequences of honest faults that once gave a round two results, with real daemons."""

from __future__ import annotations

from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest
from processes.run import ENDLESS, Found, held
from processes.site import Site

from pier_node.rounds.commitments import Commitments
from pier_node.site.journal import Journal

pytestmark = pytest.mark.processes


def commitments(site: Site) -> Commitments:
    """What binds a site, as its disk says."""
    return Journal(site.folder / "journal.json").load(0, site.node)


def test_a_fetched_state_is_on_the_disk_before_its_successor_is_voted_for(found: Found) -> None:
    """Of two sites one dies after its vote left it, fetches the round that the other committed, and is killed again."""
    run = found(2, inner=ENDLESS, outer={"algorithm": "diloco", "inner_steps": 50})
    first, second = run.by_node  # of an even split the first may go on alone
    second.start()
    first.start("--fail-at", "5:voting")
    assert first.ended() == -SIGKILL
    second.reach(5)
    with held([second]):
        decided = second.round
        first.start("--fail-at", f"{decided + 1}:staged")
        first.wait("fetches what it missed", lambda: f"caught up with round {decided}" in first.output)
        second.kill()
        assert first.ended() == -SIGKILL
    first.start()
    first.reach(decided + 2)
    assert decided not in first.digests(), "it has the round that the other committed, and commits no other"
    second.start()
    for site in (first, second):
        site.rejoin()
    run.check()
    run.stop()


def test_votes_that_were_given_away_stay_away(found: Found) -> None:
    """One of three gives its vote away and comes back while the heir, which decides with both, is cut off."""
    run = found(3, inner=ENDLESS, outer={"algorithm": "diloco", "inner_steps": 50, "overlap": True})
    leaver, heir, third = run.sites
    run.start()
    for site in run.sites:
        site.reach(2)
    with held(run.sites):
        for site in run.sites:
            site.wait("has no attempt under way", lambda site=site: not commitments(site).engaged)  # type: ignore[misc]
        third.send(SIGSTOP)
        assert leaver.stop() == 0
        assert [it.heir for it in commitments(leaver).given] == [heir.node]
        heir.send(SIGSTOP)
        third.send(SIGCONT)
        third.release()
        leaver.start()
        leaver.wait("waits for the heir", lambda: "no majority of the last round's members is here" in leaver.output)
        before = max(leaver.round, third.round)
        heir.send(SIGCONT)
    for site in run.sites:
        site.reach(before + 3)
    run.check()
    run.stop()
