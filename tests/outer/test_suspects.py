"""A suspicion counts for one attempt, and not for ever."""

from __future__ import annotations

import asyncio

from simulation.virtual_time import run

from pier_node.outer.suspects import EXPIRY, STANDSTILL, Standstill, Suspects


def test_a_suspicion_ends_by_itself() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.add("a")
        await asyncio.sleep(EXPIRY / 2)
        suspects.add("b")
        assert suspects.now() == {"a", "b"}
        await asyncio.sleep(EXPIRY / 2 + 1)
        assert suspects.now() == {"b"}

    run(main())


def test_an_attempt_clears_all() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.add("a")
        suspects.clear()
        assert not suspects.now()

    run(main())


def test_a_keeper_may_let_all_wait_for_a_while_only() -> None:
    async def main() -> None:
        standstill = Standstill()
        told = []
        for keeper, all_wait in (("a", True), ("a", True), ("a", False), ("a", True), ("b", True), ("b", True)):
            told.append(standstill.too_long(keeper, all_wait))
            await asyncio.sleep(STANDSTILL + 1)
        assert told == [False, True, False, False, False, True], "somebody still trained, and then another kept"

    run(main())
