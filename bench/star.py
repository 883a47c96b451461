"""Sites around a router, each in a network namespace: each has its own uplink rate, and each pair its own latency.

`tc tbf` limits what a site sends; the router is a thread of this process that delivers each packet when it is due
(delay_line.py). Downlinks are not limited.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.delay_line import carried
from bench.wan_link import run, shaped, tun

PREFIX = "10.78.0."
OFFLOAD_BYTES = 10
DESTINATION = slice(OFFLOAD_BYTES + 16, OFFLOAD_BYTES + 20)
"""Of a packet of IPv4 behind the header of its offload."""


@dataclass(frozen=True)
class Spot:
    """A namespace and its address."""

    namespace: str
    address: str


@contextmanager
def star(rates: Sequence[float], latency: Callable[[int, int], float]) -> Iterator[list[Spot]]:
    """Namespaces with uplinks of these rates in Mbit/s; gone after. Raises PierError.

    Args:
        latency: (from, to) -> seconds one way; inf: the packet is lost. It may change with time.
    """
    spots = [Spot(f"pier-star-{os.getpid()}-{index}", f"{PREFIX}{index + 1}") for index in range(len(rates))]
    with ExitStack() as stack:
        for spot in spots:
            run("ip", "netns", "add", spot.namespace)
            stack.callback(run, "ip", "netns", "del", spot.namespace)
        files = [tun(stack, spot.namespace) for spot in spots]
        number = {file: index for index, file in enumerate(files)}
        there = {socket.inet_aton(spot.address): index for index, spot in enumerate(spots)}

        def way(file: int, packet: bytes) -> tuple[int, float] | None:
            index = there.get(packet[DESTINATION])
            seconds = math.inf if index is None else latency(number[file], index)
            return None if index is None or seconds == math.inf else (files[index], seconds)

        stack.enter_context(carried(files, way))
        for spot, rate in zip(spots, rates, strict=True):
            shaped(spot.namespace, spot.address, rate)
        yield spots
