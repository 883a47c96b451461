"""The libp2p daemon of a site that trains: it may die, and it does not outlive the site."""

from __future__ import annotations

from signal import SIGKILL

import psutil
import pytest
from processes.run import ENDLESS, Found, held
from processes.site import Site, wait_until

pytestmark = pytest.mark.processes


def p2pd(site: Site) -> psutil.Process:
    """Of a running site."""
    (found,) = [child for child in site.daemon.children() if child.name() == "p2pd"]
    return found


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; nobody may have asked yet how."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_run_survives_the_death_of_p2pd_and_leaves_none(found: Found) -> None:
    run = found(3, transport="hivemind", inner=ENDLESS)
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
    wait_until("the p2pd of a killed site ends", lambda: is_gone(orphan))
    other.kill()
    with held([site for site in run.sites if site is not other]):
        other.start()
        other.take_part()
    other.rejoin()
    run.stop()
    assert is_gone(second)
