from __future__ import annotations

from rich.console import Console

from bench.coordinator import Figures, Latency, measure, table


def test_percentiles_are_those_of_the_answers() -> None:
    hundred = [number / 1000 for number in range(100, 0, -1)]
    assert Latency.of("Report", hundred) == Latency("Report", 100, 0.050, 0.099, 0.100)
    assert Latency.of("Report", [0.5]) == Latency("Report", 1, 0.5, 0.5, 0.5)


def test_a_few_sites_get_all_their_answers() -> None:
    figures = measure(3, 1.0, full=0)
    assert figures.errors == []
    assert {each.method: each.calls for each in figures.methods if each.method != "Report"} == {
        "Register": 3,
        "Heartbeat": 3,
        "GET /api/board": 1,
        "GET /metrics": 1,
    }
    assert figures.memory > 10e6


def test_the_table_says_whether_the_goal_was_met() -> None:
    methods = [
        Latency("Register", 9, 0.5, 0.6, 0.7),
        Latency("Heartbeat", 9, 0.01, 0.049, 1.0),
        Latency("Report", 9, 0.01, 0.05, 1.0),
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(Figures(9, 60.0, methods, [], 100_000_000, 0.5, 0.4, 7.0, 36_000_000, 72_000_000)))
    rows = {line.split()[1]: line.split() for line in capture.get().splitlines() if line.startswith("│")}
    assert "yes" not in rows["Register"]
    assert "yes" in rows["Heartbeat"]
    assert "no" in rows["Report"]
    assert "0.50 cores, 100 MB" in capture.get()
