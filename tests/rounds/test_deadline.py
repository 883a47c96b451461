"""How long a leader waits is tested through it, in test_leader.py; here is what it remembers."""

from __future__ import annotations

import asyncio
from typing import Any

from rounds.cases import ready
from simulation.virtual_time import run

from pier_node.base.patience import LearnedWait
from pier_node.config.run import SITES
from pier_node.rounds.deadline import RoundDeadline


def test_fresh_names_take_no_more_memory_and_members_keep_their_place() -> None:
    async def scene() -> None:
        roster: Any = None
        deadline, now = RoundDeadline(roster, LearnedWait(60.0, 1.0)), asyncio.get_running_loop().time
        member, stranger, began = ready("b"), ready("s0"), now()
        assert deadline.arrived(member, "abc") == deadline.arrived(stranger, "abc") == began
        await asyncio.sleep(1.0)
        assert deadline.arrived(stranger, "abc") == began, "the same announcement came before"
        for number in range(1, 2 * SITES):
            for nonce in (b"1", b"2"):
                announced = ready(f"s{number}")
                announced.nonce = nonce
                assert deadline.arrived(announced, "abc") == now()
        assert deadline.arrived(member, "abc") == began
        assert deadline.arrived(stranger, "abc") == now(), "a stranger makes room for the next one"

    run(scene())


def test_another_announcement_arrives_anew() -> None:
    async def scene() -> None:
        roster: Any = None
        deadline, now = RoundDeadline(roster, LearnedWait(60.0, 1.0)), asyncio.get_running_loop().time
        first, other = ready("b"), ready("b")
        other.nonce = b"another"
        deadline.arrived(first, "abc")
        await asyncio.sleep(1.0)
        assert deadline.arrived(other, "abc") == now()
        deadline.begin()
        await asyncio.sleep(1.0)
        assert deadline.arrived(other, "abc") == now(), "nobody has announced itself for a new round"

    run(scene())
