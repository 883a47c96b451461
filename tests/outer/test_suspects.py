"""A suspicion counts for one attempt, and not for ever."""

from __future__ import annotations

import asyncio

from simulation.virtual_time import run

from pier_node.outer.suspects import EXPIRY, Suspects


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
