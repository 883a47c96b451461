"""Sites on machines and lines in trouble: they stay in the run or come back, and the operator is told."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from multisite.harm import SmallDisk, memory_groups, rough, short_of_memory, slowed, taps
from multisite.namespaces import Namespace
from multisite.world import RATES, MakeWorld, World
from processes.run import ENDLESS
from processes.site import wait_until

from bench.delay_line import Line

pytestmark = pytest.mark.multisite


@pytest.fixture
def run(world: MakeWorld) -> World:
    return world(RATES, coordinator=True, inner=ENDLESS)


def alerts(run: World) -> str:
    return "\n".join(alert["text"] for alert in run.coordinator.get("/api/board").get("alerts", []))


def round_trips(run: World) -> list[float]:
    return [link["round_trip"] or 0.0 for link in run.coordinator.get("/api/board").get("links", [])] or [0.0]


def go_on_together(run: World, rounds: int = 3) -> None:
    """All take part in one of the next rounds."""
    at = max(site.round for site in run.sites.values())
    run.reach(at + rounds)
    for site in run.sites.values():
        assert any(len(event["members"]) == len(RATES) for event in site.events() if event["round"] > at)


def test_a_machine_at_a_fifth_of_its_speed_and_a_line_at_a_twentieth_stay_in_the_run(run: World) -> None:
    run.start()
    run.reach(3)
    with slowed(run["b"], 0.2):
        go_on_together(run)
    run.reshape(a=1.0)
    go_on_together(run)
    wait_until("the operator hears of it", lambda: "exchang" in alerts(run))


@taps
@pytest.mark.parametrize("places", ["namespaces"], indirect=True)
def test_a_line_that_is_late_and_loses_some_keeps_its_site_in_the_run(run: World) -> None:
    place, line = run.places["b"], Line(0.05, 0.02)
    assert isinstance(place, Namespace)
    run.start()
    run.reach(3)
    with rough(place.host, line):
        go_on_together(run)
        wait_until("the operator sees it", lambda: max(round_trips(run)) > 2 * line.seconds)
    assert line.lost > 10
    go_on_together(run)


def test_a_full_disk_stops_its_site_with_words_and_no_other(run: World) -> None:
    site = run["b"]
    with ExitStack() as stack:
        disk = SmallDisk(site.folder / "checkpoints", 64)
        stack.callback(disk.close)
        stack.callback(site.kill)
        run.start()
        run.reach(3)
        disk.fill()
        assert site.ended() == 1
        assert "No space left on device" in site.output
        assert "Free some space" in site.output
        run.others_go_on(site)
        wait_until("the operator hears of it", lambda: run.told("No space left on device"))
        disk.empty()
        site.start()
        site.rejoin()
        site.stop()


@memory_groups
def test_a_worker_that_the_kernel_kills_for_its_memory_is_started_again(run: World) -> None:
    site = run["c"]
    run.start()
    run.reach(3)
    worker = site.workers()[-1]
    launcher = worker.parent()
    assert launcher
    with short_of_memory(launcher):
        worker.kill()
        run.others_go_on(site)
    go_on_together(run)
    assert "a worker died" in site.output
    wait_until("the operator hears of it", lambda: run.told("a worker died"))
