"""A site killed at each named point of a round, by itself, with SIGKILL: the others go on, and it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL
from typing import Any

import pytest
from processes.run import ENDLESS, Found, held
from processes.site import Site

from pier_node.base.faults import PAIR_PHASES, PHASES
from pier_node.wire.transport import Transport

pytestmark = pytest.mark.processes


def dies_and_others_go_on(victim: Site, others: list[Site]) -> None:
    assert victim.ended() == -SIGKILL
    last = max(site.round for site in others)
    for site in others:
        site.reach(last + 2)


KINDS: dict[str, tuple[str, int, Sequence[str], Transport]] = {
    "leader": ("diloco", 0, PHASES, "grpc"),
    "another": ("diloco", 2, PHASES, "grpc"),
    "another, hivemind": ("diloco", 2, PHASES, "hivemind"),
    "decider": ("noloco", 0, [phase for phase in PAIR_PHASES if phase not in ("journaled", "fetching")], "grpc"),
    "voter": ("noloco", 2, [phase for phase in PAIR_PHASES if phase not in ("voting", "fetching")], "grpc"),
}
"""Of each kind: the algorithm, the victim's place among the node ids, the phases that it gets to, and the carrier."""


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_phase(found: Found, kind: str) -> None:
    algorithm, place, phases, transport = KINDS[kind]
    tables: dict[str, Any] = {"inner": ENDLESS, "outer": {"algorithm": algorithm, "inner_steps": 4}}
    run = found(3, transport=transport, **tables)
    victim, others = run.by_node[place], [site for site in run.sites if site is not run.by_node[place]]
    for site in others:
        site.start()
    victim.start("--fail-at", f"3:{phases[0]}")
    for phase in (*phases[1:], None):
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
    run.stop()
