"""What is made of the sites' events, the router between them, and one run of it all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from typing import Any

import pytest
from processes.run import NO_NAMESPACES
from rich.console import Console

from bench.pipeline import LINKS, link_table, measure, table
from bench.pipeline_figures import Iteration, Result, iterations, stepped
from bench.pipeline_hook.sitecustomize import pace
from bench.pipeline_sites import Trial
from bench.slow_links import has_latency, star


def event(number: int, began: float, tasks: float, at: float, step: int = 0) -> dict[str, Any]:
    spans = {"round": number, "began": began, "tasks": tasks, "average": 0.5, "total": 0.25, "step": 0.125}
    return {"round": number, "inner_step": step or number, "time": at, "iteration": spans}


A = [event(1, 100.0, 10.0, 112.0), event(2, 113.0, 9.0, 124.0), event(3, 126.0, 9.0, 137.0)]
B = [event(1, 100.5, 10.5, 112.5), event(2, 113.0, 8.0, 124.0), event(3, 126.0, 9.0, 137.0)]


def test_the_parts_of_an_iteration_add_up_to_the_time_until_the_next_one_begins() -> None:
    first, second = iterations([A, B], {1: 10.0, 2: 9.81, 3: 9.0})
    assert first == Iteration(1, 10.0, 11.0, 0.5, 0.25, 0.125, 0.625, 0.5)
    assert first.error == pytest.approx(-1 / 11)
    assert sum(vars(first).values()) - first.round - first.predicted == 113.0 - 100.0
    assert second.error == pytest.approx(0.09)


def test_only_iterations_that_counted_and_were_predicted_are_taken() -> None:
    assert [it.round for it in iterations([A, B], {2: 9.0})] == [2]
    failed = [A[0], {**A[1], "inner_step": 1}, {**A[2], "inner_step": 2}]
    assert [it["round"] for it in stepped(failed)] == [1, 3]
    absent = [A[0], {**A[1], "iteration": A[0]["iteration"]}]
    assert [it["round"] for it in stepped(absent)] == [1]


def test_the_table_and_the_record_have_the_error() -> None:
    both = iterations([A, B], {1: 10.0, 2: 9.81})
    result = Result("skip", 6, both)
    assert result.within == 1.0
    assert result.typical_error == pytest.approx((1 / 11 + 0.09) / 2)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table([result]))
    assert "9.0%" in capture.get()
    assert "compute is paced" in capture.get()
    record = json.loads(json.dumps(result.record()))
    assert [it["error"] for it in record["iterations"]] == pytest.approx([-1 / 11, 0.09])


def test_the_speed_on_a_link_is_that_of_whole_iterations_to_those_without_limits() -> None:
    both = iterations([A, B], {1: 10.0, 2: 9.81})
    assert [it.whole for it in both] == [13.0, 13.0]
    slow = [Iteration(it.round, it.predicted, it.measured + 13.0, 0.5, 0.25, 0.125, 0.625, 0.5) for it in both[:1]]
    shown = link_table({"no limits": Result("full", 4, both), "int8": Result("full", 4, slow)})
    assert [[*column.cells] for column in shown.columns][-1] == ["1.00", "0.50"]
    assert {it.trial().rates for it in LINKS[1:]} == {(80.0,) * 4, (10.0,) * 4}
    assert {2 * it.trial().latency(0, 1) for it in LINKS[1:]} == {0.08}


def test_a_task_takes_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()

    class Stage:
        embed = forward = loss = backward = lambda self, x: x + 1

    pace(Stage, 3.0)  # type: ignore[arg-type]
    monkeypatch.setattr("time.sleep", slept.append)
    assert [getattr(Stage(), name)(1) for name in ("embed", "forward", "loss", "backward")] == [2] * 4
    assert slept == pytest.approx([3.0, 3.0, 1.0, 6.0], abs=0.5)


@pytest.fixture
def shaped() -> None:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")) or not has_latency():
        pytest.skip(NO_NAMESPACES)


@pytest.mark.netns
@pytest.mark.usefixtures("shaped")
def test_a_packet_takes_the_latency_of_its_pair() -> None:
    with star([50.0, 50.0, 50.0], lambda a, b: 0.001 if a + b == 1 else 0.04) as spots:
        near, far = (round_trip(spots[0].namespace, spot.address) for spot in spots[1:])
    assert 0.002 < near < 0.04 < 0.08 < far
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert spots[0].namespace not in left


def round_trip(namespace: str, address: str) -> float:
    """Of a refused connection, seconds: the least of some."""
    code = (
        "import socket, time\n"
        "def one():\n"
        "    began = time.monotonic()\n"
        f"    assert socket.socket().connect_ex(('{address}', 9)) == {errno.ECONNREFUSED}\n"
        "    return time.monotonic() - began\n"
        "print(min(one() for _ in range(5)))"
    )
    words = ["ip", "netns", "exec", namespace, "python3", "-c", code]
    return float(subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout)


@pytest.mark.netns
@pytest.mark.usefixtures("shaped")
def test_a_run_of_four_sites() -> None:
    result = measure(Trial("skip", 4, forward=0.02, microbatches=4, codec=("int4", "int8")), 1, warm=2)
    (found,) = result.iterations
    assert found.round >= 3
    assert 0 < found.predicted < 60
    assert 0 < found.measured < 60
