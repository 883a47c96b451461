"""A site killed at each named point of a round, by itself, with SIGKILL: the others go on, and it comes back."""

from __future__ import annotations

from signal import SIGKILL

import pytest
from processes.run import Found, held
from processes.site import Site

from pier_node.faults import PHASES

pytestmark = pytest.mark.processes


def dies_and_others_go_on(victim: Site, others: list[Site]) -> None:
    assert victim.ended() == -SIGKILL
    last = max(site.round for site in others)
    for site in others:
        site.reach(last + 2)


@pytest.mark.parametrize("place", [0, 2], ids=["keeper", "another"])
def test_killed_at_every_phase(found: Found, place: int) -> None:
    run = found(3, inner={"total_steps": 70 * 4}, outer={"inner_steps": 4})
    victim, others = run.by_node[place], [site for site in run.sites if site is not run.by_node[place]]
    for site in others:
        site.start()
    victim.start("--fail-at", f"3:{PHASES[0]}")
    for phase in (*PHASES[1:], None):
        dies_and_others_go_on(victim, others)
        with held(others):
            if phase == "fetching":  # it is behind already
                victim.start("--fail-at", f"1:{phase}")
                victim.ended()
            else:
                at = max(site.round for site in others) + 3
                victim.start(*(["--fail-at", f"{at}:{phase}"] if phase else []))
                victim.take_part()
    victim.rejoin()
    run.finish()
