"""Compaction: the board stays what it is, whatever happens meanwhile, and after a start."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from pathlib import Path

import pytest
from coordinator.cases import open_store
from coordinator.played import LABS, Played, node
from coordinator.runs.test_read_model import shown

from pier_coordinator.runs.compaction import Compaction
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

FACTS = [Fact(fact.time, fact.kind, fact.node, fact.body) for fact in Played(rounds=40, retried=()).facts()]


class Running:
    """A board that hears of what is stored in a folder."""

    def __init__(self, folder: Path) -> None:
        self.board = ReadModel(lambda: FACTS[-1].time)
        self.compaction = Compaction(self.board)
        self.store = open_store(folder, self.compaction.told)
        self.compaction.restore(self.store)


def whole() -> ReadModel:
    board = ReadModel(lambda: FACTS[-1].time)
    for number, fact in enumerate(FACTS, start=1):
        board.apply(Fact(fact.time, fact.kind, fact.node, fact.body, number))
    return board


async def test_the_board_is_the_same_after_compactions_and_starts(tmp_path: Path) -> None:
    for at in range(0, len(FACTS), 150):
        run = Running(tmp_path)
        await run.store.add_facts(FACTS[at : at + 100])
        await run.compaction.compact(run.store)
        await run.compaction.compact(run.store)  # there is nothing new
        await run.store.add_facts(FACTS[at + 100 : at + 150])
        await run.store.close()
    run = Running(tmp_path)
    assert shown(run.board) == shown(whole())
    assert run.board.curves_of([node(LABS[0].name)]) == whole().curves_of([node(LABS[0].name)])
    assert len(list(run.store.facts())) < 60
    await run.store.close()


async def test_no_site_seems_silent_because_reading_takes_long(tmp_path: Path) -> None:
    run = Running(tmp_path)
    await run.store.add_facts(FACTS)
    await run.store.close()
    seconds = itertools.count(FACTS[-1].time)
    board = ReadModel(lambda: next(seconds))  # a second passes whenever it looks at the clock
    compaction = Compaction(board)
    store = open_store(tmp_path, compaction.told)
    compaction.restore(store)
    assert board.curves["loss"].points() == whole().curves["loss"].points() | {"reset": True}
    await store.close()


async def test_facts_that_come_during_a_compaction_are_stored_and_shown_after_it(tmp_path: Path) -> None:
    run = Running(tmp_path)
    await run.store.add_facts(FACTS[:100])
    under_way = asyncio.create_task(run.compaction.compact(run.store))
    for fact in FACTS[100:]:
        await run.store.add_facts([fact])
    await under_way
    assert not run.compaction.busy
    assert shown(run.board) == shown(whole())
    await run.store.close()
    again = Running(tmp_path)
    assert shown(again.board) == shown(whole())
    await again.store.close()


async def test_a_compaction_that_a_full_disk_ends_loses_nothing(tmp_path: Path) -> None:
    run = Running(tmp_path)
    await run.store.add_facts(FACTS)
    pages = await run.store.do(lambda it: it.execute("PRAGMA page_count").fetchone()[0])
    await run.store.do(lambda it: it.execute(f"PRAGMA max_page_count = {pages}").fetchone())
    with pytest.raises(sqlite3.OperationalError, match="full"):
        await run.compaction.compact(run.store)
    assert not run.compaction.busy
    await run.store.do(lambda it: it.execute("PRAGMA max_page_count = 100000").fetchone())
    assert len(list(run.store.facts())) == len(FACTS)
    await run.compaction.compact(run.store)
    assert len(list(run.store.facts())) < 10
    await run.store.close()
    again = Running(tmp_path)
    assert shown(again.board) == shown(whole())
    await again.store.close()
