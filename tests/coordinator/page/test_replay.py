"""An event log, shown again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from coordinator.played import Played

from pier_coordinator.page.replay import feed, read_log, replay
from pier_coordinator.runs.read_model import ReadModel
from pier_coordinator.store.facts import Fact
from pier_node.base.errors import PierError

GOOD = Fact(1.0, "note", "a", {"level": 20, "text": "it"}, 1).line()


def log(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_facts_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    facts = Played(rounds=5).facts()
    path = log(tmp_path / "events.jsonl", *(fact.line() for fact in reversed(facts)))
    assert [fact.time for fact in read_log(path)] == [fact.time for fact in facts]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: not a line of an event log"),
        ("", "line 2: "),
        (GOOD.replace('"note"', '"dance"'), "line 2: a fact of no known kind: 'dance'"),
        (GOOD.replace("1.0", '"soon"'), "line 2: its time must be a number"),
        (GOOD.replace("1.0", "NaN"), "line 2: its time must be a number"),
        (GOOD.replace('"a"', "7"), "line 2: its time must be a number, and its node a text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(PierError, match="Take that line out") as caught:
        read_log(log(tmp_path / "events.jsonl", GOOD, line))
    assert problem in caught.value.problem


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="no-such-file"):
        read_log(tmp_path / "no-such-file")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PierError, match="binary"):
        read_log(tmp_path / "binary")


async def test_time_goes_by_as_fast_as_wished() -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    facts = [Fact(time, "note", "a", {"text": "it"}) for time in (10.0, 10.0, 14.0, 15.0)]
    await feed(ReadModel(clock=None), facts, 2.0, wait)
    assert waited == [0, 2.0, 0.5]


async def test_all_at_once_lets_the_page_have_its_turn() -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    board = ReadModel(clock=None)
    await feed(board, [Fact(float(time), "sample", "a", {"loss": 1.0}) for time in range(2500)], 0, wait)
    assert waited == [0, 0, 0]
    assert board.stamp == 2500


async def test_a_run_is_shown_again_and_cannot_be_changed(tmp_path: Path) -> None:
    path = log(tmp_path / "events.jsonl", *(fact.line() for fact in Played(rounds=12).facts()))
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(replay(path, 0, 0, address.set_result))
    try:
        async with asyncio.timeout(10), aiohttp.ClientSession() as session:
            page = await address
            told = {"totals": {"round": 0}}
            while told["totals"]["round"] < 12:
                async with session.get(f"{page}api/board") as answer:
                    told = json.loads(await answer.text())
            async with session.post(f"{page}api/actions/stop", json={"nodes": []}) as answer:
                assert answer.status == 404
            async with session.get(f"{page}healthz") as answer:
                assert (await answer.json())["ok"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert told["totals"]["sites"] == 3


async def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(PierError, match=f"port {port}"):
            await replay(log(tmp_path / "events.jsonl", GOOD), 0, port)
