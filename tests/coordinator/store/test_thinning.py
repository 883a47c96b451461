from __future__ import annotations

from pathlib import Path

from coordinator.cases import ALICE, BOB, NOW, note, open_store

from pier_coordinator.store.facts import Fact
from pier_coordinator.store.store import DAY, LOG_NAME, SPAN, Thinning


def sample(time: float, node: str) -> Fact:
    return Fact(time, "sample", node, {"loss": 1.0})


async def test_of_old_samples_one_of_a_site_and_five_minutes_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    begin = NOW - NOW % SPAN
    for step in range(0, 1800, 10):
        await store.add_facts([sample(begin + step, site.node) for site in (ALICE, BOB)])
    await store.add_facts([note("stays")])
    thinning = Thinning(store)
    assert await thinning.run(begin + DAY) == 0
    gone = await thinning.run(begin + 600 + DAY)
    assert gone == 2 * (60 - 2)
    left = [(fact.time - begin, fact.node) for fact in store.facts(kinds=["sample"]) if fact.time < begin + 600]
    assert left == [(0, ALICE.node), (0, BOB.node), (300, ALICE.node), (300, BOB.node)]
    assert await thinning.run(begin + 1800 + DAY) == 2 * (120 - 4)
    assert [fact.body["text"] for fact in store.facts(kinds=["note"])] == ["stays"]
    assert await Thinning(store).run(begin + 1800 + DAY) == 0
    assert len((tmp_path / LOG_NAME).read_text().splitlines()) == 361
    await store.close()


async def test_numbers_are_not_given_again_when_the_newest_facts_are_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.add_facts([sample(NOW, ALICE.node), sample(NOW + 1, ALICE.node)])
    assert await Thinning(store).run(NOW + 2 * DAY) == 1
    await store.close()
    again = open_store(tmp_path)
    (added,) = await again.add_facts([note("next")])
    assert added.number == 3
    await again.close()
