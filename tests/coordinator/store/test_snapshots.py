"""Snapshots in the database: when they count, and what they replace."""

from __future__ import annotations

import sqlite3
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from coordinator.cases import ALICE, BOB, NOW, note, open_store

from pier_coordinator.store import store as module
from pier_coordinator.store.facts import Fact
from pier_coordinator.store.snapshots import FACTS, finish, forget, pack, put_parts, unpack
from pier_coordinator.store.store import LOG_NAME, MIGRATIONS, Store, migrate

PART: dict[str, Any] = {"name": "a", "curve": array("d", [1.5, -2.0]), "counts": [array("Q", [2**63]), None, 3]}


def registered(node: str, name: str) -> Fact:
    return Fact(NOW, "site", node, {"name": name})


async def take(store: Store, number: int, *parts: dict[str, Any]) -> None:
    await store.do(put_parts, number, 0, map(pack, parts))
    await store.do(finish, number)
    while await store.do(forget):
        pass


def test_a_part_is_read_as_it_was_packed() -> None:
    assert unpack(pack(PART)) == PART
    with pytest.raises(TypeError, match="cannot hold a set"):
        pack({"what": {1}})


async def test_a_snapshot_replaces_facts_but_the_newest_of_the_run_and_its_sites(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run = Fact(NOW, "run", "", {"name": "lark"})
    await store.add_facts([run, registered(ALICE.node, "old"), registered(BOB.node, "b"), registered(ALICE.node, "a")])
    await store.add_facts([note(str(number)) for number in range(2 * FACTS)])
    await store.add_facts([note("later")])
    await take(store, 4 + 2 * FACTS, PART, {"last": True})
    assert [(fact.kind, fact.body.get("name", "")) for fact in store.facts()] == [
        *(("run", "lark"), ("site", "b"), ("site", "a"), ("note", ""))
    ]
    number, parts = store.snapshot()
    assert (number, list(parts)) == (4 + 2 * FACTS, [PART, {"last": True}])
    assert len((tmp_path / LOG_NAME).read_text().splitlines()) == 5 + 2 * FACTS
    await store.close()


async def test_a_snapshot_counts_once_it_is_finished_and_replaces_the_one_before(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.add_facts([note("a"), note("b")])
    assert (store.snapshot()[0], list(store.snapshot()[1])) == (0, [])
    await take(store, 1, {"first": 1})
    await store.do(put_parts, 2, 0, [pack({"second": 2})])
    await store.close()
    again = open_store(tmp_path)
    assert (again.snapshot()[0], list(again.snapshot()[1])) == (1, [{"first": 1}])
    assert [fact.number for fact in again.facts(after=1)] == [2]
    while await again.do(forget):  # what a crash has left
        pass
    await take(again, 2, {"second": 3})
    assert list(again.snapshot()[1]) == [{"second": 3}]
    assert list(again.facts()) == []
    (added,) = await again.add_facts([note("next")])
    assert added.number == 3
    await again.close()


async def test_room_that_facts_have_left_is_used_again(tmp_path: Path) -> None:
    store, sizes = open_store(tmp_path), []
    for _ in range(4):
        last = (await store.add_facts([note("x" * 500) for _ in range(2000)]))[-1].number
        await take(store, last, PART)
        await store.tidy()
        sizes.append((tmp_path / "run.db").stat().st_size)
    assert sizes[-1] < 1.1 * sizes[0]
    assert store.used_bytes() < sizes[-1] / 4
    assert 0 < store.snapshot_bytes() < 1000
    await store.close()


async def test_a_file_with_much_room_in_it_is_smaller_after_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHRINKS", 1 << 20)
    store = open_store(tmp_path)
    last = (await store.add_facts([note("x" * 500) for _ in range(6000)]))[-1].number
    await take(store, last, PART)
    await store.close()
    assert (tmp_path / "run.db").stat().st_size > 3 << 20
    again = open_store(tmp_path)
    assert (tmp_path / "run.db").stat().st_size < 1 << 20
    assert list(again.snapshot()[1]) == [PART]
    assert (await again.add_facts([note("next")]))[0].number == last + 1
    await again.close()


async def test_a_folder_of_the_version_before_snapshots_keeps_its_facts(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as file:
        migrate(file, tmp_path, MIGRATIONS[:3])
        file.execute("INSERT INTO facts VALUES (7, 1.0, 'note', 'a', '{\"level\": 20, \"text\": \"old\"}')")
    store = open_store(tmp_path)
    assert [(fact.number, fact.body["text"]) for fact in store.facts()] == [(7, "old")]
    assert store.snapshot()[0] == 0
    await take(store, 7, PART)
    assert list(store.facts()) == []
    await store.close()
