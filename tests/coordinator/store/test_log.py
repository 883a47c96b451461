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


async def fill(folder: Path, first: int, last: int) -> None:
    store = open_store(folder)
    for number in range(first, last + 1):
        await store.add_facts([RUN if number == 1 else note(f"it {number}")])
    await store.close()


@pytest.mark.parametrize("lost", [0, 1, 4], ids=lambda lost: f"{lost} facts lost by the database")
async def test_wherever_a_rotation_is_cut_off_nothing_is_lost(tmp_path: Path, lost: int) -> None:
    """The new log may be missing, or have any part of what it begins with. The database may lack the newest facts."""
    path, base = tmp_path / LOG_NAME, tmp_path / "run.db"
    await fill(tmp_path, 1, 10 - lost)
    earlier = base.read_bytes()
    await fill(tmp_path, 11 - lost, 10)
    if lost:
        base.write_bytes(earlier)
    old, kept = path.read_bytes(), base.read_bytes()
    assert len(old) >= 1000, "the next fact comes into a new log"
    length = old.index(b"\n") + 1  # of the fact that it begins with
    for cut in [None, *range(0, length, 9), length]:
        base.write_bytes(kept)
        put_aside(path).write_bytes(old)
        path.unlink() if cut is None else path.write_bytes(old[:cut])
        await fill(tmp_path, 11, 11)
        assert [fact.number for fact in lines(path)] == [1, 11]
        store = open_store(tmp_path)
        assert [fact.number for fact in store.facts()] == [*range(1, 12)]
        await store.close()


async def test_facts_of_both_logs_go_back_into_a_database_that_lost_them(tmp_path: Path) -> None:
    path, base = tmp_path / LOG_NAME, tmp_path / "run.db"
    await fill(tmp_path, 1, 8)
    earlier = base.read_bytes()
    await fill(tmp_path, 9, 14)
    assert put_aside(path).exists()
    base.write_bytes(earlier)
    store = open_store(tmp_path)
    assert [fact.number for fact in store.facts()] == [*range(1, 15)]
    await store.close()
