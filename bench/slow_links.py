"""Links like the internet between network namespaces: rate by `tc tbf`, latency by a delay line in this process.

`link` joins two namespaces. `star` has any number around a router: each has its own uplink rate, each pair its own
latency, and downlinks are not limited.

Each namespace has one end of a TUN device whose other end is a file here (delay_line.py). Packets are as large as TCP
hands them down (segmentation offload), so that a Gbit/s each way takes a fraction of a core, whereas vde_switch and
wirefilter top out at 165 Mbit/s.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.delay_line import OFFLOAD_HEADER, TUN, TUN_DEVICE, Line, carried, device, joined
from pier_node.base.errors import PierError
from pier_node.doctor.machine import SETTING

PREFIX = "10.78.0."
NETWORK, HOSTS = f"{PREFIX}0/24", (f"{PREFIX}1", f"{PREFIX}2")
CONGESTION = "cubic"
"""Linux's default, whatever this machine's is: what most sites have."""
OFFLOAD_BYTES = 10
DESTINATION = slice(OFFLOAD_BYTES + 16, OFFLOAD_BYTES + 20)
"""Of a packet of IPv4 behind the header of its offload."""
_SET_OFFLOAD = 0x400454D0
_CHECKSUM, _TCP4 = 0x01, 0x02
_NETWORK = 0x40000000


def refuse_without_tools() -> None:
    """Raise PierError when no link can be made here."""
    if os.geteuid() != 0:
        raise PierError("network namespaces need root", "Run it as root, for instance in a virtual machine.")
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            raise PierError(f"there is no `{tool}` here", "Debian: apt-get install iproute2")


def has_latency() -> bool:
    """Whether links can have latency here; without, they have a rate only."""
    return os.path.exists(TUN)


@contextmanager
def link(rate: int, latency: float) -> Iterator[tuple[str, str]]:
    """Names of two namespaces joined by a link of `rate` Mbit/s each way, `latency` seconds one way; gone after.

    Connections keep their speed when they are idle, as docs/operations.md advises.
    """
    names = tuple(f"pier-wan-{os.getpid()}-{side}" for side in (0, 1))
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        if latency:
            stack.enter_context(joined([_tun(stack, name) for name in names], Line(latency)))
        else:
            _ip(names[0], "link add wan0 type veth peer name wan0 netns " + names[1])
        for name, host in zip(names, HOSTS, strict=True):
            _shaped(name, host, rate)
        yield names[0], names[1]


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
            _run("ip", "netns", "add", spot.namespace)
            stack.callback(_run, "ip", "netns", "del", spot.namespace)
        files = [_tun(stack, spot.namespace) for spot in spots]
        number = {file: index for index, file in enumerate(files)}
        there = {socket.inet_aton(spot.address): index for index, spot in enumerate(spots)}

        def way(file: int, packet: bytes) -> tuple[int, float] | None:
            index = there.get(packet[DESTINATION])
            seconds = math.inf if index is None else latency(number[file], index)
            return None if index is None or seconds == math.inf else (files[index], seconds)

        stack.enter_context(carried(files, way))
        for spot, rate in zip(spots, rates, strict=True):
            _shaped(spot.namespace, spot.address, rate)
        yield spots


def _shaped(namespace: str, host: str, rate: float) -> None:
    """Have the link of a namespace up, with an address and a rate in Mbit/s for what it sends."""
    _ip(namespace, f"addr add {host}/24 dev wan0")
    _ip(namespace, "link set lo up")
    _run(*f"ip netns exec {namespace} sysctl -q {SETTING}=0".split())
    _ip(namespace, "link set wan0 up")
    _ip(namespace, f"route replace {NETWORK} dev wan0 src {host} congctl {CONGESTION}")
    _run(*f"tc -n {namespace} qdisc add dev wan0 root tbf rate {rate:g}mbit burst 64kb latency 300ms".split())


def enter(namespace: str) -> None:
    """Have this process in a namespace from now on."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _tun(stack: ExitStack, namespace: str) -> int:
    """The file of a TUN device that lies in a namespace."""
    born = f"wan{os.getpid()}"
    file = stack.enter_context(device(born, TUN_DEVICE | OFFLOAD_HEADER))
    fcntl.ioctl(file, _SET_OFFLOAD, _CHECKSUM | _TCP4)
    _run("ip", "link", "set", born, "netns", namespace, "name", "wan0")
    _ip(namespace, "link set wan0 txqueuelen 10000")
    return file


def _ip(namespace: str, command: str) -> None:
    """Run a command of `ip` in a namespace. Raises PierError."""
    _run("ip", "-n", namespace, *command.split())


def _run(*words: str) -> None:
    """Run a program. Raises PierError."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise PierError(f"{' '.join(words)}: {done.stderr.strip()}", "A kernel with network namespaces is needed.")
