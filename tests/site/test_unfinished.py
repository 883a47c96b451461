from __future__ import annotations

import asyncio
from typing import Any

import pytest
from simulation.virtual_time import run

from pier_node.base.tasks import Signal
from pier_node.config.run import RunConfig
from pier_node.outer.schedule import total_rounds
from pier_node.site.shutdown import UNFINISHED_SECONDS, wait_for_unfinished
from pier_proto.v1.peer_pb2 import Phase, Pulse

WHOLE = RunConfig.model_validate({"run": {"name": "lake", "sites": 2}, "model": {"preset": "llama-tiny"}})
PIPED = RunConfig.model_validate(
    {"run": {"name": "lake", "sites": 2}, "model": {"preset": "llama-tiny"}, "pipeline": {"stages": 2, "skip": 0.0}}
)
LAST = total_rounds(WHOLE)


class Roll:
    """A roster with one other site."""

    def __init__(self, pulse: Pulse | None) -> None:
        self.contacts, self.pulse, self.here = {"bob": None}, pulse, True
        self.changed, self.announced = Signal(), 0

    async def announce(self) -> None:
        self.announced += 1

    def alive(self, node: str) -> bool:
        return self.here

    def called(self, node: str) -> str:
        return f"{node} (0123)"

    def pulse_of(self, node: str) -> Pulse | None:
        return self.pulse


def stayed(config: RunConfig, roll: Roll, then: Pulse | None = None, gone: bool = False) -> float:
    """Seconds that a site stays when the other one changes after 10 s."""

    async def main() -> float:
        async def change() -> None:
            await asyncio.sleep(10.0)
            roll.pulse, roll.here = then or roll.pulse, not gone
            roll.changed.notify()

        roster: Any = roll
        began, changing = asyncio.get_running_loop().time(), asyncio.create_task(change())
        await wait_for_unfinished(config, roster)
        took = asyncio.get_running_loop().time() - began
        changing.cancel()
        return took

    return run(main())


def test_who_is_done_is_not_waited_for() -> None:
    assert stayed(WHOLE, Roll(Pulse(round=LAST))) == 0.0
    assert stayed(WHOLE, Roll(None)) == 0.0, "nothing is known of it"
    assert stayed(PIPED, Roll(Pulse(phase=Phase.PHASE_DONE))) == 0.0


def test_a_site_that_may_go_at_once_says_first_that_it_is_done() -> None:
    roll = Roll(Pulse(phase=Phase.PHASE_DONE))
    assert stayed(PIPED, roll) == 0.0
    assert roll.announced == 1


def test_who_needs_the_last_state_is_waited_for() -> None:
    assert stayed(WHOLE, Roll(Pulse(round=LAST - 1)), Pulse(round=LAST)) == pytest.approx(10.0)
    joining = Pulse(round=LAST, phase=Phase.PHASE_WAITING)
    assert stayed(PIPED, Roll(joining), Pulse(round=LAST, phase=Phase.PHASE_DONE)) == pytest.approx(10.0)


def test_who_dies_meanwhile_is_not_waited_for_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert stayed(WHOLE, Roll(Pulse(round=1)), gone=True) == pytest.approx(10.0)
    assert "not finished: bob (0123)." in caplog.text
    assert "start it as well, with the same command" in caplog.text


def test_when_all_are_done_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    stayed(WHOLE, Roll(Pulse(round=1)), Pulse(round=LAST))
    assert not caplog.text


def test_nobody_is_waited_for_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    assert stayed(WHOLE, Roll(Pulse(round=1))) == pytest.approx(UNFINISHED_SECONDS)
    assert "not finished: bob (0123)." in caplog.text
