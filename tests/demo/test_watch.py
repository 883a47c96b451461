from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from demo.seen import event, record

from pier_node.demo.record import Record
from pier_node.demo.sites import Site
from pier_node.demo.train import Watch
from pier_node.rounds.folder import DAEMON_FILE, EVENTS_FILE


class Pretended(Site):
    """A site whose daemon is this process."""

    running = True
    code: int | None = None

    def http(self) -> str | None:
        path = self.folder / DAEMON_FILE
        return str(json.loads(path.read_text())["http"]) if path.exists() else None


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[dict[str, object]]:
    """What alpha answers; it is reached as its daemon.json says."""
    answer: dict[str, object] = {}

    async def status(_: web.Request) -> web.Response:
        return web.json_response(answer) if answer else web.Response(status=500, text="not yet")

    app = web.Application()
    app.add_routes([web.get("/status", status)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (tmp_path / "alpha").mkdir()
    daemon = {"pid": os.getpid(), "http": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    (tmp_path / "alpha" / DAEMON_FILE).write_text(json.dumps(daemon))
    yield answer
    await runner.cleanup()


@pytest.fixture
def seen(tmp_path: Path) -> Record:
    return Record(record(tmp_path).config, ["alpha"])


async def test_answers_are_taken_in(tmp_path: Path, seen: Record, page: dict[str, object]) -> None:
    async with Watch([Pretended(tmp_path, "alpha", 1)], seen) as watch:
        await watch.look()
        assert seen.tracks["alpha"].status == {}
        page.update(event("alpha", 0, inner_step=7))
        await watch.look()
    assert seen.tracks["alpha"].status["inner_step"] == 7


async def test_events_are_read_once_and_whole(tmp_path: Path, seen: Record) -> None:
    (tmp_path / "alpha").mkdir()
    site, lines = Pretended(tmp_path, "alpha", 1), [json.dumps(event("alpha", number)) + "\n" for number in range(3)]
    async with Watch([site], seen) as watch:
        with (site.folder / EVENTS_FILE).open("w") as file:
            for written, expected in ((lines[0] + lines[1][:30], 0), (lines[1][30:], 1), ("", 1), (lines[2], 2)):
                file.write(written)
                file.flush()
                await watch.look()
                assert seen.tracks["alpha"].round == expected
    assert [step for step, _ in seen.validation] == [0, 20, 40]


async def test_a_site_that_nobody_can_reach(tmp_path: Path, seen: Record) -> None:
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha" / DAEMON_FILE).write_text(json.dumps({"http": "http://127.0.0.1:9"}))
    site = Pretended(tmp_path, "alpha", 1)
    async with Watch([site], seen) as watch:
        await watch.look()
        assert seen.tracks["alpha"].code is None
        site.code = 3
        await watch.look()
    assert seen.tracks["alpha"].status == {}
    assert seen.tracks["alpha"].code == 3
