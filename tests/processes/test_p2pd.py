"""The libp2p daemon of a site that trains: it may die, and it does not outlive the site."""

from __future__ import annotations

from signal import SIGKILL

import psutil
import pytest
from processes.run import Found, held
from processes.site import PATIENCE, Site

pytestmark = pytest.mark.processes


def p2pd(site: Site) -> psutil.Process:
    """Of a running site."""
    (found,) = [child for child in site.daemon.children() if child.name() == "p2pd"]
    return found


def test_a_run_survives_the_death_of_p2pd_and_leaves_none(found: Found) -> None:
    run = found(3, transport="hivemind", inner={"total_steps": 60 * 10})
    run.start()
    for site in run.sites:
        site.reach(3)
    victim, other = run.by_node[0], run.by_node[1]
    first = p2pd(victim)
    first.kill()
    at = victim.round
    victim.reach(at + 3)
    victim.rejoin()
    assert "p2pd ended (-9): starting it again" in victim.output
    second, orphan = p2pd(victim), p2pd(other)
    assert second != first
    other.send(SIGKILL)
    assert psutil.wait_procs([orphan], timeout=PATIENCE)[1] == []
    other.kill()
    with held([site for site in run.sites if site is not other]):
        other.start()
        other.take_part()
    run.finish()
    assert not second.is_running()
