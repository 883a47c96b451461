"""What is told of orders."""

from __future__ import annotations

from pathlib import Path

from coordinator.cases import ALICE, running

from pier_coordinator.store.sites import REPLICA


async def test_an_order_is_told_in_words(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await run.let_in(ALICE)
        of = run.coordinator
        for activity in ("train", "pause", "stop"):
            await of.order(activity)
        async with run.site(ALICE) as alice:
            await alice.register(ALICE, starting=True)
        await of.assign(REPLICA, [ALICE.node])
    assert [fact.body["text"] for fact in run.told if fact.kind == "order"] == [
        "resumed by the operator",
        "paused by the operator",
        "stopped by the operator",
        "resumed by being started again",
        "assigned replica by the operator",
    ]
