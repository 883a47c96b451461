"""How fast do sites average 25M fp32 values, against hivemind and gloo?

    python -m bench.outer_sync [--quick] [--system NAME]... [--json FILE] [--links]

Each peer is a process; they meet on loopback. The systems take turns averaging the same vectors, and the slowest
peer's time counts. MB/s are bytes of the vector over that time. Processor seconds are user and system, of all peers
together; a GB is one of fp32 values that a peer sends to another, and N peers send 2(N - 1) vectors.

--links adds two peers in network namespaces joined by links of 50 and 200 Mbit/s (tc tbf; needs root): there each peer
sends exactly one vector's bytes, so that the share of the link is 8·bytes / (time · rate).
"""

from __future__ import annotations

import json
import multiprocessing as mp
import socket
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.outer_sync_peers import PEERS, Cost, Task, main

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
    processor_seconds_per_gigabyte: float


def measure(system: str, peers: int, length: int, reps: int) -> list[Cost]:
    """Each exchange: seconds of the slowest peer, processor seconds of all; the warm-up is left out."""
    context = mp.get_context("spawn")
    gate, results = context.Barrier(peers), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        port = free_ports(peers)
        tasks = [Task(rank, peers, length, reps + WARMUPS, port, Path(folder)) for rank in range(peers)]
        processes = [context.Process(target=main, args=(system, task, gate, results)) for task in tasks]
        for process in processes:
            process.start()
        try:
            costs = [_costs(*results.get(timeout=300)) for _ in processes]
            for process in processes:
                process.join(timeout=10)
        finally:
            for process in processes:
                process.terminate()
    exchanges = list(zip(*costs, strict=True))[WARMUPS:]
    return [Cost(max(it.seconds for it in each), sum(it.processor for it in each)) for each in exchanges]


def _costs(error: str, costs: list[Cost]) -> list[Cost]:
    if error:
        raise RuntimeError(error)
    return costs


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


def compare(systems: Sequence[str], peers: int, length: int, reps: int, console: Console) -> list[Result]:
    """Systems with so many peers."""
    results = []
    for system in systems:
        with console.status(f"{system}, {peers} peers"):
            costs = measure(system, peers, length, reps)
        times = [cost.seconds for cost in costs]
        middle, processor = statistics.median(times), statistics.median(cost.processor for cost in costs)
        per_gigabyte = processor / (4e-9 * length * 2 * (peers - 1))
        results.append(Result(system, peers, middle, min(times), max(times), 4e-6 * length / middle, per_gigabyte))
    return results


def table(results: list[Result], length: int) -> Table:
    """The comparison, with ratios of pier to the others of the same size."""
    caption = "s: median (range); CPU: processor seconds of all peers, for each GB sent"
    shown = Table("system", title=f"Averaging {length / 1e6:g}M fp32 values over loopback", caption=caption)
    for heading in ("peers", "s", "MB/s", "CPU s/GB", "to hivemind", "to gloo"):
        shown.add_column(heading, justify="right")
    speeds = {(result.system, result.peers): result.megabytes_per_second for result in results}
    for result in results:
        ratios = [_ratio(result, speeds.get((other, result.peers))) for other in ("hivemind", "gloo")]
        span = f"{result.seconds:.3f} ({result.fastest:.3f}-{result.slowest:.3f})"
        shown.add_row(
            result.system,
            str(result.peers),
            span,
            f"{result.megabytes_per_second:.0f}",
            f"{result.processor_seconds_per_gigabyte:.2f}",
            *ratios,
        )
    return shown


def _ratio(result: Result, speed: float | None) -> str:
    return f"{result.megabytes_per_second / speed:.2f}x" if speed else ""


@click.command()
@click.option("--quick", is_flag=True, help="2.5M values, three repetitions, two peers.")
@click.option("--links", is_flag=True, help="Shaped links too; needs root.")
@click.option("--system", "systems", multiple=True, type=click.Choice(list(PEERS)), help="Only this one; repeatable.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
def cli(quick: bool, links: bool, systems: Sequence[str], json_file: Path | None) -> None:
    """Compare ways to average a vector between processes."""
    console = Console()
    length, reps, sizes = (2_500_000, 3, [2]) if quick else (25_000_000, 5, [2, 4])
    results = [result for peers in sizes for result in compare(systems or list(PEERS), peers, length, reps, console)]
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
