"""Server-sent events over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from coordinator.cases import PATIENCE
from coordinator.page_cases import serving, watching
from coordinator.played import LABS, Played, Replayed, node, pulse

from pier_coordinator.page import app as stream
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact

A = node(LABS[0].name)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TICK", 0.01)


def board(rounds: int = 10) -> ReadModel:
    return Replayed(Played(rounds=rounds).facts())


def note(text: str) -> Fact:
    return Fact(Played().start, "note", A, {"level": 30, "text": text})


def texts(told: dict[str, Any]) -> list[str]:
    return [event["text"] for event in told["events"]]


async def test_first_comes_everything_then_what_changed() -> None:
    made = board()
    async with serving(made) as address, watching(address) as events:
        first = await events.next()
        assert first["full"]
        assert len(first["sites"]) == 3
        made.apply(note("hello"))
        second = await events.next()
        assert not second["full"]
        assert texts(second) == ["hello"]
        assert [site["node"] for site in second["sites"]] == [A]
        assert events.id == f"{made.boot}-{second['stamp']}"


async def test_who_comes_back_gets_only_what_was_missed() -> None:
    made = board()
    async with serving(made) as address:
        async with watching(address) as events:
            await events.next()
        made.apply(note("missed"))
        async with watching(address, events.id) as again:
            told = await again.next()
    assert not told["full"]
    assert texts(told) == ["missed"]


@pytest.mark.parametrize(
    "last", ["nonsense", "0badb007-3", "-", "{boot}-x", "{boot}-²", "{boot}-99999999", "{boot}-" + 5000 * "9"]
)
async def test_who_saw_another_board_gets_everything(last: str) -> None:
    made = board()
    async with serving(made) as address, watching(address, last.format(boot=made.boot)) as events:
        assert (await events.next())["full"]


async def test_an_empty_board_is_told_once() -> None:
    made = Replayed()
    async with serving(made) as address, watching(address) as events:
        assert (await events.next())["sites"] == []
        made.apply(note("first"))
        assert texts(await events.next()) == ["first"]


async def test_many_who_watch_are_told_the_same() -> None:
    made = board()
    async with serving(made) as address, watching(address) as one, watching(address) as other:
        assert (await one.next())["stamp"] == (await other.next())["stamp"]
        made.apply(note("to all"))
        assert texts(await one.next()) == texts(await other.next()) == ["to all"]


async def test_an_alert_comes_and_goes_without_a_fact() -> None:
    now = Played().start
    made = ReadModel(clock=lambda: now)
    made.pulse(A, pulse(LABS[0], 1), alive=True)
    async with serving(made) as address, watching(address) as events:
        assert (await events.next())["alerts"] == []
        made.pulse(A, {}, alive=False)
        told = await events.next()
        while not told["alerts"]:
            told = await events.next()
        assert told["alerts"][0]["kind"] == "silent"


async def test_a_quiet_line_shows_that_it_is_still_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT", 0.02)
    monkeypatch.setattr(stream, "TICK", 60.0)
    async with serving(board()) as address, watching(address) as events, asyncio.timeout(PATIENCE):
        while await events.line() != ": still here":
            pass


async def test_too_many_who_watch_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_VIEWERS", 1)
    async with serving(board()) as address, watching(address) as events, aiohttp.ClientSession() as session:
        await events.next()
        async with session.get(f"{address}/api/stream") as answer:
            assert answer.status == 503


async def test_the_server_stops_while_somebody_watches() -> None:
    made = board()
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as session:
        async with serving(made) as address:
            answer = await session.get(f"{address}/api/stream")
            await answer.content.readuntil(b"data")
        assert await answer.content.read() is not None
