"""How much of a slow link does an exchange use? Two peers in network namespaces, shaped on both ends with `tc tbf`.

python -m bench.outer_sync --links          (root; Debian: iproute2)
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.outer_sync_peers import PEERS, Task

HOSTS = ("10.77.0.1", "10.77.0.2")
SPACES = ("pier-bench-0", "pier-bench-1")
PORT = 7790
RATES = (50, 200)
SECONDS = 8.0
"""How long an exchange should take on an ideal link."""


@dataclass(frozen=True)
class LinkResult:
    """One rate of the link: Mbit/s that the link allows, and that the exchange made of it (payload only)."""

    rate: int
    system: str
    achieved: float
    share: float


@contextmanager
def shaped_link(rate: int) -> Iterator[None]:
    """Two namespaces joined by a link of `rate` Mbit/s each way; gone afterwards."""
    try:
        for space in SPACES:
            _ip("netns", "add", space)
        _ip("link", "add", "pb0", "netns", SPACES[0], "type", "veth", "peer", "name", "pb1", "netns", SPACES[1])
        for number, (space, host) in enumerate(zip(SPACES, HOSTS, strict=True)):
            _ip("-n", space, "addr", "add", f"{host}/24", "dev", f"pb{number}")
            _ip("-n", space, "link", "set", f"pb{number}", "up")
            shape = f"tc qdisc add dev pb{number} root tbf rate {rate}mbit burst 64kb latency 300ms"
            _ip("netns", "exec", space, *shape.split())
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def measure_links(quick: bool) -> list[LinkResult]:
    """Every rate, with and without TLS."""
    reps, seconds = (2, SECONDS / 4) if quick else (5, SECONDS)
    return [_measure(rate, system, reps, seconds) for rate in RATES for system in ("pier", "pier, TLS", "pier, libp2p")]


def show(links: list[dict[str, Any]]) -> Table:
    """The links as a table."""
    shown = Table(
        "link, Mbit/s", "system", title="Two peers on a shaped link", caption="payload over what the link allows"
    )
    shown.add_column("achieved, Mbit/s", justify="right")
    shown.add_column("share", justify="right")
    for link in links:
        shown.add_row(str(link["rate"]), link["system"], f"{link['achieved']:.1f}", f"{link['share']:.1%}")
    return shown


def _measure(rate: int, system: str, reps: int, seconds: float) -> LinkResult:
    length = int(rate * 1e6 / 8 * seconds / 4)
    with shaped_link(rate), tempfile.TemporaryDirectory() as folder:
        peers = [
            subprocess.Popen(
                ["ip", "netns", "exec", SPACES[rank], sys.executable, "-m", "bench.outer_sync_links",
                 system, str(rank), str(length), str(reps + 1), folder],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        outputs = [peer.communicate(timeout=300)[0] for peer in peers]
    times = [max(pair) for pair in zip(*(json.loads(output) for output in outputs), strict=True)][1:]
    achieved = 32e-6 * length / statistics.median(times)
    return LinkResult(rate, system, achieved, achieved / rate)


class FileGate:
    """A barrier of two processes that share a folder; the exchange itself keeps them together after the first."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._passed = folder, rank, 0

    def wait(self) -> int:
        """Return when the other one is here."""
        self._passed += 1
        (self._folder / f"gate{self._rank}-{self._passed}").touch()
        other = self._folder / f"gate{1 - self._rank}-{self._passed}"
        pause = threading.Event()
        while not other.exists():
            pause.wait(0.002)
        return 0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _peer(system: str, rank: int, length: int, reps: int, folder: Path) -> None:
    times: list[float] = []
    task = Task(rank, 2, length, reps, PORT, folder, HOSTS)
    PEERS[system](task, FileGate(folder, rank), lambda cost: times.append(cost.seconds))
    print(json.dumps(times))


if __name__ == "__main__":
    _peer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
