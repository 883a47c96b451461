"""How fast do sites average 25M fp32 values, against hivemind and gloo?

    python -m bench.outer_sync [--quick] [--json FILE] [--links]

Each peer is a process; they meet on loopback. Every system averages the same vectors, turn and turn about, and the
slowest peer's time counts. MB/s are bytes of the vector over that time. --links adds two peers in network namespaces
joined by links of 50 and 200 Mbit/s (tc tbf; needs root): there each peer sends exactly one vector's bytes, so that the
share of the link is 8·bytes / (time · rate).
"""

from __future__ import annotations

import json
import multiprocessing as mp
import socket
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.outer_sync_peers import PEERS, Task, main

WARMUPS = 1


@dataclass(frozen=True)
class Result:
    """One system with so many peers."""

    system: str
    peers: int
    seconds: float
    fastest: float
    slowest: float
    megabytes_per_second: float


def measure(system: str, peers: int, length: int, reps: int) -> list[float]:
    """Seconds of each exchange, of the slowest peer; the warm-up is left out."""
    context = mp.get_context("spawn")
    gate, results = context.Barrier(peers), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        port = free_ports(peers)
        tasks = [Task(rank, peers, length, reps + WARMUPS, port, Path(folder)) for rank in range(peers)]
        processes = [context.Process(target=main, args=(system, task, gate, results)) for task in tasks]
        for process in processes:
            process.start()
        try:
            times = [_times(*results.get(timeout=300)) for _ in processes]
            for process in processes:
                process.join(timeout=10)
        finally:
            for process in processes:
                process.terminate()
    return [max(each) for each in zip(*times, strict=True)][WARMUPS:]


def _times(error: str, times: list[float]) -> list[float]:
    if error:
        raise RuntimeError(error)
    return times


def free_ports(count: int) -> int:
    """The first of `count` ports that nobody listens on."""
    for base in range(20_000, 30_000, 16):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, each in enumerate(sockets):
                each.bind(("127.0.0.1", base + number))
            return base
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports")


def compare(peers: int, length: int, reps: int, console: Console) -> list[Result]:
    """All systems with so many peers."""
    results = []
    for system in PEERS:
        with console.status(f"{system}, {peers} peers"):
            times = measure(system, peers, length, reps)
        middle = statistics.median(times)
        results.append(Result(system, peers, middle, min(times), max(times), 4e-6 * length / middle))
    return results


def table(results: list[Result], length: int) -> Table:
    """The comparison, with ratios of pier to the others of the same size."""
    shown = Table("system", title=f"Averaging {length / 1e6:g}M fp32 values over loopback", caption="s: median (range)")
    for heading in ("peers", "s", "MB/s", "to hivemind", "to gloo"):
        shown.add_column(heading, justify="right")
    speeds = {(result.system, result.peers): result.megabytes_per_second for result in results}
    for result in results:
        ratios = [f"{result.megabytes_per_second / speeds[other, result.peers]:.2f}x" for other in ("hivemind", "gloo")]
        span = f"{result.seconds:.3f} ({result.fastest:.3f}-{result.slowest:.3f})"
        shown.add_row(result.system, str(result.peers), span, f"{result.megabytes_per_second:.0f}", *ratios)
    return shown


@click.command()
@click.option("--quick", is_flag=True, help="2.5M values, three repetitions, two peers.")
@click.option("--links", is_flag=True, help="Shaped links too; needs root.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(quick: bool, links: bool, json_file: Path | None) -> None:
    """Compare ways to average a vector between processes."""
    console = Console()
    length, reps, sizes = (2_500_000, 3, [2]) if quick else (25_000_000, 5, [2, 4])
    results = [result for peers in sizes for result in compare(peers, length, reps, console)]
    console.print(table(results, length))
    figures: dict[str, Any] = {"length": length, "results": [vars(result) for result in results]}
    if links:
        from bench.outer_sync_links import measure_links, show

        figures["links"] = [vars(link) for link in measure_links(quick)]
        console.print(show(figures["links"]))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    cli()
