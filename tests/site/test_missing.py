"""A site that cannot go on by itself says who has to be started, and where."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from simulation.cluster import Disk
from simulation.network import Network, Weather
from simulation.statements import MemoryProofs, PlainStatements
from simulation.virtual_time import run

from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.attempt import Tools
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.roster import Roster
from pier_node.site.report import PATIENCE, Reporter, tell_of_missing
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site


async def _nowhere(_: OuterState) -> None: ...


async def _nobody(*_: object) -> OuterState:
    raise AssertionError("nothing is adopted here")


def told(
    members: Sequence[str], alive: Sequence[str], phase: Any, stateless: bool = False, sites: int = 1
) -> list[str]:
    """What site b is told until some time after it should have been, now and then."""

    async def main() -> list[str]:
        carrier = Network(1, Weather()).join("b")
        reporter = Reporter(RunConfig(), Site(node="b", name="lab"), carrier, Progress(phase))
        roster = Roster(carrier, reporter.pulse)
        tensors = {ANCHOR: SharedVector(4), MOMENTUM: SharedVector(4)}
        state = OuterState(3, tuple(members), tensors, {})
        if not stateless:
            tools = Tools(carrier, roster, PlainStatements("b"), Disk(), MemoryProofs(), _nowhere, _nobody)
            reporter.rounds = Rounds(tools, state, lambda _: 4)
            reporter.rounds.sites, reporter.invitation = sites, "Another site joins with `pier-node start`."
        for node in {*members, *alive} - {"b"}:
            roster.add(Site(node=node, name=f"site-{node}", address=f"{node}:1"))
        for node in alive:  # the test says that they answer
            task = roster.contacts[node].task
            assert task
            task.cancel()
        telling, seen = asyncio.create_task(tell_of_missing(reporter, roster)), list[str]()
        for _ in range(int(4 * PATIENCE)):
            for node in alive:
                contact = roster.contacts[node]
                contact.pulse, contact.heard_at = Pulse(site=contact.site), asyncio.get_running_loop().time()
                contact.failures = 0
            await asyncio.sleep(1.0)
            if reporter.missing not in seen:
                seen.append(reporter.missing)
            assert reporter.missing in reporter.status(roster)["message"]
        telling.cancel()
        await roster.stop()
        return seen

    return run(main())


WAITING = Phase.PHASE_WAITING


def test_a_run_that_waits_for_its_first_sites_says_how_they_join(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert told(["b"], [], WAITING, sites=2) == ["", "Another site joins with `pier-node start`."]
    assert [record.levelname for record in caplog.records if "joins with" in record.getMessage()] == ["INFO"]
    assert told(["b"], [], WAITING, sites=1) == [""]
    assert told(["b"], [], Phase.PHASE_TRAINING, sites=2) == [""]


def test_who_waits_for_a_site_that_has_ended_says_which_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    before, said = told(["a", "b"], [], WAITING)
    assert before == ""
    assert said.startswith(
        "site-a (a) does not answer, and this site cannot continue without it. It may have been stopped"
    )
    assert "may have finished the run and ended: run `pier-node start --data FOLDER` there again" in said
    assert [record.getMessage() for record in caplog.records].count(said) == 1


def test_of_several_all_are_named() -> None:
    assert told(["a", "b", "c", "d"], ["d"], WAITING)[1].startswith("site-a (a), site-c (c) do not answer")


def test_who_has_no_state_yet_needs_any_site_that_has_one() -> None:
    assert "site-a (a), site-c (c) do not answer" in told(["a", "c"], [], Phase.PHASE_CATCHING_UP, stateless=True)[1]
    assert told(["a", "c"], ["c"], Phase.PHASE_CATCHING_UP, stateless=True) == [""]


@pytest.mark.parametrize(
    ("members", "alive", "phase"),
    [
        (["a", "b"], [], Phase.PHASE_TRAINING),
        (["a", "b", "c"], ["c"], WAITING),
        (["b", "c"], [], WAITING),  # of an even split the lowest id goes on
        (["b"], [], WAITING),
    ],
)
def test_who_can_go_on_says_nothing(members: list[str], alive: list[str], phase: Any) -> None:
    assert told(members, alive, phase) == [""]
