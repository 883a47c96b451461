"""The grid and its formulas, the tables, and one cell over a real link."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes.run import NO_NAMESPACES
from rich.console import Console

from bench.slow_links import has_latency
from bench.wan import cell, fill_table, measure, of, plot, tables
from bench.wan_grid import LATENCY, METHODS, PARAMETERS, PUBLIC, RATES, Cell, Task, is_long, reckoned, tasks
from bench.wan_site import Mark


def a_cell(task: Task, utilisation: float = 0.5, rounds: int = 3) -> Cell:
    return Cell(task, utilisation, 10.0, 1.0 if rounds else math.nan, rounds)


def every_cell() -> list[Cell]:
    return [a_cell(task, task.ideal(task.rate)) for task in tasks(RATES, LATENCY)]


def text(*shown: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(*shown)
    return capture.get()


@pytest.mark.parametrize(
    ("method", "bits_a_value"),
    [("ddp", 32), ("diloco none", 32), ("pier int8", 8.125), ("pier int4 + overlap", 4.25)],
)
def test_two_sites_send_every_value_once(method: str, bits_a_value: float) -> None:
    assert Task(method, 50, LATENCY, 128).bits == pytest.approx(bits_a_value * PARAMETERS)


def test_with_fragments_a_round_sends_and_takes_a_fourth() -> None:
    whole, part = (
        Task(name, 50, LATENCY, 128) for name in ("pier int4 + overlap", "diloco int4 + overlap + fragments")
    )
    assert (4 * part.bits, 4 * part.compute) == (whole.bits, whole.compute)
    assert part.ideal(50) == pytest.approx(whole.ideal(50))
    assert part.rounds() == (9, 12), "the whole model three times, as without"


def test_a_pair_sends_its_weights_once() -> None:
    assert Task("noloco int8 + overlap", 50, LATENCY, 128).bits == pytest.approx(8.125 * PARAMETERS)


def test_compute_is_that_of_h_steps_but_of_one_with_ddp() -> None:
    assert Task("diloco none", 50, LATENCY, 128).compute == pytest.approx(3.34, abs=0.01)
    assert Task("ddp", 50, LATENCY, 1).compute == pytest.approx(0.0261)


def test_ideal_utilisation_with_and_without_overlap() -> None:
    plain, hidden = Task("diloco none", 200, LATENCY, 128), Task("pier int4 + overlap", 20, LATENCY, 128)
    exchange = 32 * PARAMETERS / 200e6
    assert plain.ideal(200) == pytest.approx(plain.compute / (plain.compute + exchange))
    assert hidden.ideal(20) == pytest.approx(hidden.compute / (4.25 * PARAMETERS / 20e6))
    assert hidden.ideal(1000) == 1.0


@pytest.mark.parametrize("steps", [32, 128])
def test_the_public_figures_lie_below_what_two_sites_could_reach(steps: int) -> None:
    for rate, measured in PUBLIC[steps].items():  # four sites send half as much again
        assert 0.4 < measured / Task("diloco none", rate, LATENCY, steps).ideal(rate) < 0.95


def test_the_grid_is_whole() -> None:
    found = {(task.rate, task.method, task.steps) for task in tasks(RATES, LATENCY)}
    wanted = {(rate, method, steps) for rate in RATES for method in METHODS for steps in (32, 128)}
    assert {it for it in wanted if it[1] != "ddp"} | {(rate, "ddp", 1) for rate in RATES} == found
    assert {task.latency for task in tasks(RATES, LATENCY)} == {LATENCY}


@pytest.mark.parametrize("method", METHODS)
def test_runs_of_the_grid_are_valid_and_do_not_end(method: str) -> None:
    config = Task(method, 50, LATENCY, 32).config()
    assert config.run.sites == 2
    assert config.outer.start == "none"
    assert config.inner.total_steps >= 10_000


def test_long_rounds_are_measured_fewer_times() -> None:
    assert Task("diloco none", 20, LATENCY, 128).rounds() == (1, 1)
    assert Task("pier int4 + overlap", 50, LATENCY, 128).rounds() == (3, 3)
    assert Task("pier int8", 1000, LATENCY, 32).rounds() == (2, 6)


def test_of_long_cells_the_first_is_the_one_that_others_are_reckoned_from() -> None:
    long = [task for task in tasks(RATES, LATENCY) if is_long(task)]
    assert {task.rate for task in long} == {20}
    assert (long[0].method, long[0].steps) == ("diloco none", 128)


def test_a_reckoned_cell_takes_as_long_to_exchange_as_the_measured_one() -> None:
    measured = a_cell(Task("diloco none", 20, LATENCY, 128), utilisation=0.1)
    exchange = 9 * measured.task.compute
    found = reckoned(Task("ddp", 20, LATENCY, 1), measured)
    assert found.rounds == 0
    assert found.utilisation == pytest.approx(0.0261 / (0.0261 + exchange))
    assert found.mbit == pytest.approx(32e-6 * PARAMETERS / (0.0261 + exchange))
    same = reckoned(measured.task, measured)
    assert same.utilisation == pytest.approx(measured.utilisation)


def test_the_slower_site_counts() -> None:
    task = Task("diloco none", 50, LATENCY, 100, step_seconds=0.01)
    fast = [Mark(0.0, 0, 1.0), Mark(1.5, 10**6, 0.5), Mark(3.0, 2 * 10**6, 0.5)]
    slow = [Mark(0.5, 0, 1.0), Mark(2.0, 10**6, 0.9), Mark(4.5, 2 * 10**6, 0.7)]
    found = cell(task, [fast, slow])
    assert (found.utilisation, found.mbit) == pytest.approx((0.5, 4.0))
    assert (found.exchange, found.rounds) == (0.7, 2)


def test_a_record_is_json_and_says_whether_it_was_measured() -> None:
    task = Task("diloco none", 20, LATENCY, 128)
    record = json.loads(json.dumps(reckoned(task, a_cell(task)).record(), allow_nan=False))
    assert record["rounds"] == 0
    assert record["exchange"] is None
    assert record["ideal"] == pytest.approx(task.ideal(20))
    assert (record["method"], record["rate"], record["steps"]) == ("diloco none", 20, 128)


def test_ddp_is_in_the_table_of_every_h() -> None:
    cells = every_cell()
    assert [cell.task.rate for cell in of(cells, "ddp", 32)] == list(RATES)
    assert of(cells, "ddp", 32) == of(cells, "ddp", 128)


def test_tables_mark_what_was_reckoned_and_say_that_compute_is_a_sleep() -> None:
    cells = every_cell()
    cells[0] = reckoned(cells[0].task, a_cell(cells[0].task, 0.0625))
    shown = text(*tables(cells))
    assert shown.count("6.2%, 18.5 *") == 1
    assert shown.count("compute is synthetic") == 2
    assert "H = 32, 40 ms one way" in shown
    for measured in ("2.4%", "11.6%", "36.1%", "71.5%"):
        assert measured in shown


def test_the_table_of_the_fill() -> None:
    shown = text(fill_table({"rate": 100, "latency": 0.04, "times": [10.1, 10.25], "mbit": 97.0, "share": 0.97}))
    assert "without a codec, 100" in shown
    assert "80 ms round trip" in shown
    assert "10.10, 10.25" in shown
    assert "97.0%" in shown


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    plot(every_cell(), tmp_path / "wan.png")
    assert (tmp_path / "wan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.netns
@pytest.mark.parametrize("method", ["pier int8", "noloco int8 + overlap"])
def test_two_sites_on_a_slow_link(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip(NO_NAMESPACES)
    latency = LATENCY if has_latency() else 0.0
    task = Task(method, 20, latency, 4, parameters=500_000, step_seconds=0.01)
    found = measure(task)
    assert 0 < found.utilisation <= 1
    assert found.utilisation < task.ideal(task.rate)
    assert 0 < found.mbit < task.rate
    assert found.exchange > 1e-6 * task.bits / task.rate + 2 * latency
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"pier-wan-{os.getpid()}-" not in left
    assert "Traceback" not in capfd.readouterr().err
