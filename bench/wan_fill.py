"""Does one exchange fill a link with latency? Two peers average a vector over the carrier with TLS, without a codec.

Only the exchange counts, as in bench/outer_sync.py: no vote, no outer step. Each peer sends as many bytes as the
vector has, so the share of the link is 8·bytes / (time · rate). The bytes of TCP and TLS, and slow start, count
against it.
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.outer_sync_links import FileGate
from bench.outer_sync_peers import PEERS, Task
from bench.slow_links import HOSTS, enter, link
from bench.wan_grid import PARAMETERS
from pier_node.base.errors import PierError

RATE = 100
PORT = 7810
REPS = 3
"""The first is left out."""
PATIENCE = 120.0
QUICK = 3_000_000


def fill(latency: float, quick: bool) -> dict[str, Any]:
    """The median exchange: seconds, payload in Mbit/s, and its share of the link. Raises PierError."""
    length = QUICK if quick else PARAMETERS
    with link(RATE, latency) as spaces, tempfile.TemporaryDirectory() as folder:
        times = _exchanges(spaces, length, Path(folder))
    seconds = statistics.median(times)
    mbit = 32e-6 * length / seconds
    return {"rate": RATE, "latency": latency, "parameters": length, "times": times, "mbit": mbit, "share": mbit / RATE}


def _exchanges(spaces: tuple[str, str], length: int, folder: Path) -> list[float]:
    """Seconds of each exchange at its slower peer, the first left out."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    peers = [context.Process(target=_peer, args=(rank, spaces[rank], length, folder, results)) for rank in (0, 1)]
    try:
        for peer in peers:
            peer.start()
        times = [results.get(timeout=PATIENCE) for _ in peers]
    except queue.Empty as error:
        raise PierError("the exchange on the link with latency did not end", "Try again on an idle machine.") from error
    finally:
        for peer in peers:
            peer.kill()
            peer.join()
    return [max(pair) for pair in zip(*times, strict=True)][1:]


def _peer(rank: int, space: str, length: int, folder: Path, results: Any) -> None:
    enter(space)
    times: list[float] = []
    task, gate = Task(rank, 2, length, REPS, PORT, folder, HOSTS), FileGate(folder, rank)
    PEERS["pier, TLS"](task, gate, lambda cost: times.append(cost.seconds))
    results.put(times)
