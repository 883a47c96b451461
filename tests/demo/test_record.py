from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from demo.seen import NODES, event, record, run_of

from pier_node.demo.record import Record, watching
from pier_node.demo.sites import Site
from pier_node.rounds.folder import DAEMON_FILE, EVENTS_FILE


def test_a_run_from_its_events(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=10)
    assert (seen.rounds, seen.start_steps, seen.parameters) == (10, 20, 1_037_696)
    assert seen.finished
    assert [step for step, _ in seen.validation] == list(range(0, 201, 20))
    assert [loss for _, loss in seen.validation] == pytest.approx([5.25 - number / 5 for number in range(11)])
    assert (seen.compared, seen.forks, seen.digest) == (9, [], f"{10:064x}")
    assert seen.lost == []


def test_not_finished_while_one_is_behind(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=9)
    for name in ("alpha", "beta"):
        seen.saw_event(name, event(name, 10))
    assert not seen.finished
    assert seen.newest.name == "alpha"
    seen.saw_event("gamma", event("gamma", 10))
    assert seen.finished


def test_other_bits_are_seen(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=3)
    seen.saw_event("gamma", event("gamma", 4))
    assert seen.forks == []
    seen.saw_event("beta", event("beta", 4, digest="f" * 64))
    assert seen.forks == [4]


def test_validation_of_a_round_that_was_not_measured_is_an_old_one(tmp_path: Path) -> None:
    seen = record(tmp_path)
    seen.config = seen.config.model_copy(update={"inner": seen.config.inner.model_copy(update={"eval_every": 4})})
    seen.rounds = 10
    for number in range(1, 11):
        seen.saw_event("alpha", event("alpha", number))
    assert [step for step, _ in seen.validation] == [0, 80, 160, 200]


def test_losses_go_forward_only(tmp_path: Path) -> None:
    track = record(tmp_path).tracks["alpha"]
    for step, loss in ((3, 4.0), (2, 9.0), (3, 9.0), (5, None), (6, 3.0)):
        track.saw_status(event("alpha", 0, inner_step=step, loss=loss))
    assert track.loss == [(0, 5.0), (3, 4.0), (6, 3.0)]


def test_bytes_of_synchronous_training(tmp_path: Path) -> None:
    three, two = (Record(run_of(tmp_path, sites, "pier", steps), []) for sites, steps in ((3, 600), (2, 1)))
    assert three.synchronous_bytes == pytest.approx(2 * 4 * 1_037_696 * 2 / 3 * 600)
    assert three.synchronous_bytes == pytest.approx(3_320_627_200)
    two.parameters = 1_000_000
    assert two.synchronous_bytes == 4_000_000


class TestHopeless:
    def test_nobody_is_lost(self, tmp_path: Path) -> None:
        assert not record(tmp_path, rounds=4).hopeless

    @pytest.mark.parametrize("name", ["alpha", "gamma"])
    def test_two_of_three_are_a_majority(self, tmp_path: Path, name: str) -> None:
        seen = record(tmp_path, rounds=4)
        seen.tracks[name].code = -9
        assert [track.name for track in seen.lost] == [name]
        assert not seen.hopeless

    def test_one_of_three_is_none(self, tmp_path: Path) -> None:
        seen = record(tmp_path, rounds=4)
        seen.tracks["alpha"].code = seen.tracks["beta"].code = -9
        assert seen.hopeless

    def test_one_of_the_two_that_were_left_is_none(self, tmp_path: Path) -> None:
        seen = record(tmp_path, rounds=4)
        seen.tracks["alpha"].code = -9
        pair = [seen.tracks[name].status["node"] for name in ("beta", "gamma")]
        for name in ("beta", "gamma"):
            seen.saw_event(name, event(name, 5, members=pair))
        assert not seen.hopeless
        seen.tracks["beta"].code = 1
        assert seen.hopeless

    def test_a_polite_site_hands_over_its_vote(self, tmp_path: Path) -> None:
        seen = record(tmp_path, rounds=4)
        seen.tracks["alpha"].code = seen.tracks["beta"].code = 0
        assert not seen.hopeless
        seen.tracks["gamma"].code = 0
        assert seen.hopeless

    def test_the_first_exchange_needs_everybody(self, tmp_path: Path) -> None:
        seen = record(tmp_path, rounds=1)
        seen.tracks["gamma"].code = 1
        assert seen.hopeless

    def test_the_end_of_the_run_is_no_loss(self, tmp_path: Path) -> None:
        seen = record(tmp_path, rounds=10)
        for track in seen.tracks.values():
            track.code = 0
        assert (seen.lost, seen.hopeless, seen.alive) == ([], False, [])
        assert seen.finished


class TestInPairs:
    def test_every_site_has_a_model_of_its_own(self, tmp_path: Path) -> None:
        seen = record(tmp_path, rounds=3, algorithm="noloco")
        assert seen.spread is None
        for number, name in enumerate(NODES):
            more = {"digest": f"{number:064x}", "spread": 0.1 * number, "validation_loss": 2.0 + number}
            seen.saw_event(name, event(name, 4, **more))
        assert (seen.apart, seen.forks) == (True, [])
        assert seen.spread == pytest.approx(0.1)
        assert seen.validation[-1] == (80, 3.0), "the mean over the sites"

    def test_one_that_is_left_goes_on_but_for_the_first_round(self, tmp_path: Path) -> None:
        seen = record(tmp_path, rounds=3, algorithm="noloco")
        seen.tracks["alpha"].code = seen.tracks["beta"].code = -9
        assert not seen.hopeless
        seen.tracks["gamma"].code = -9
        assert seen.hopeless
        begun = record(tmp_path, algorithm="noloco")
        begun.tracks["alpha"].code = -9
        assert begun.hopeless


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
    async with watching([Pretended(tmp_path, "alpha", 1)], seen) as watch:
        await watch.look()
        assert seen.tracks["alpha"].status == {}
        page.update(event("alpha", 0, inner_step=7))
        await watch.look()
    assert seen.tracks["alpha"].status["inner_step"] == 7


async def test_events_are_read_once_and_whole(tmp_path: Path, seen: Record) -> None:
    (tmp_path / "alpha").mkdir()
    site, lines = Pretended(tmp_path, "alpha", 1), [json.dumps(event("alpha", number)) + "\n" for number in range(3)]
    async with watching([site], seen) as watch:
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
    async with watching([site], seen) as watch:
        await watch.look()
        assert seen.tracks["alpha"].code is None
        site.code = 3
        await watch.look()
    assert seen.tracks["alpha"].status == {}
    assert seen.tracks["alpha"].code == 3
