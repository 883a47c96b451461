"""The event log: how it is put aside when it is long, and what is known after that."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.cases import NOW, note, open_store

from pier_coordinator.store import log
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.log import put_aside
from pier_coordinator.store.store import LOG_NAME

RUN = Fact(NOW, "run", "", {"name": "lark"})


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "LIMIT", 1000)


def lines(path: Path) -> list[Fact]:
    return [Fact.parse(line) for line in path.read_text().splitlines()]


def both(path: Path) -> list[Fact]:
    """The facts of a log and of the one before it, each once."""
    before, now = lines(put_aside(path)), lines(path)
    known = {fact.number for fact in before}
    return sorted(before + [fact for fact in now if fact.number not in known], key=lambda fact: fact.number)


async def test_a_long_log_is_put_aside_and_the_next_one_begins_with_what_the_run_is(tmp_path: Path) -> None:
    path = tmp_path / LOG_NAME
    store = open_store(tmp_path)
    stored = await store.add_facts([RUN])
    for number in range(100):
        stored += await store.add_facts([note(f"it {number}")])
    await store.close()
    assert path.stat().st_size + put_aside(path).stat().st_size < 3000
    assert (lines(path)[0], lines(path)[-1]) == (stored[0], stored[-1])
    assert lines(put_aside(path))[-1].number + 1 == lines(path)[1].number
    shown = both(path)
    assert shown[0] == stored[0]
    assert shown[1:] == stored[-len(shown) + 1 :], "each once, in order"


async def test_nothing_comes_twice_or_is_lost_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / LOG_NAME
    for number in range(50):
        store = open_store(tmp_path)
        await store.add_facts([note(f"it {number}")])
        await store.close()
    numbers = [fact.number for fact in both(path)]
    assert numbers == list(range(numbers[0], 51))


async def test_a_crash_just_after_the_log_was_put_aside_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / LOG_NAME
    store = open_store(tmp_path)
    for number in range(5):
        await store.add_facts([note(f"it {number}")])
    await store.close()
    path.rename(put_aside(path))
    store = open_store(tmp_path)
    await store.add_facts([note("after")])
    await store.close()
    assert [fact.number for fact in lines(path)] == [6]
    assert [fact.number for fact in both(path)] == [1, 2, 3, 4, 5, 6]
