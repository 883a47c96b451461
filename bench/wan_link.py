"""A link like the internet between two network namespaces: rate by `tc tbf`, latency by a delay line in this process.

Each namespace has one end of a TUN device whose other end is a file here. A thread reads packets on one side and writes
them to the other when their time has come. Packets are as large as TCP hands them down (segmentation offload), so that
a Gbit/s each way takes a fraction of a core, where vde_switch and wirefilter end at 165 Mbit/s.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pier_node.errors import PierError

TUN = "/dev/net/tun"
NETWORK, HOSTS = "10.78.0.0/24", ("10.78.0.1", "10.78.0.2")
CONGESTION = "cubic"
"""Linux's default, whatever this machine's is: what most sites have."""
BURST = 64
"""Packets read at once."""
LARGEST = 70_000
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_IP_ONLY, _NO_INFO, _OFFLOAD_HEADER = 0x0001, 0x1000, 0x4000
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
    """Names of two namespaces joined by a link of `rate` Mbit/s each way, `latency` seconds one way; gone after."""
    names = tuple(f"pier-wan-{os.getpid()}-{side}" for side in (0, 1))
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        if latency:
            stack.enter_context(_delay_line([_tun(stack, name) for name in names], latency))
        else:
            _ip(names[0], "link add wan0 type veth peer name wan0 netns " + names[1])
        for name, host in zip(names, HOSTS, strict=True):
            _ip(name, f"addr add {host}/24 dev wan0")
            _ip(name, "link set lo up")
            _ip(name, "link set wan0 up")
            _ip(name, f"route replace {NETWORK} dev wan0 src {host} congctl {CONGESTION}")
            _run(*f"tc -n {name} qdisc add dev wan0 root tbf rate {rate}mbit burst 64kb latency 300ms".split())
        yield names[0], names[1]


def enter(namespace: str) -> None:
    """Have this process in a namespace from now on."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _tun(stack: ExitStack, namespace: str) -> int:
    """The file of a TUN device that lies in a namespace."""
    file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    stack.callback(os.close, file)
    born = f"wan{os.getpid()}"
    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH22x", born.encode(), _IP_ONLY | _NO_INFO | _OFFLOAD_HEADER))
    fcntl.ioctl(file, _SET_OFFLOAD, _CHECKSUM | _TCP4)
    _run("ip", "link", "set", born, "netns", namespace, "name", "wan0")
    _ip(namespace, "link set wan0 txqueuelen 10000")
    return file


@contextmanager
def _delay_line(files: list[int], latency: float) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=_carry, args=(files, latency, over), name="delay line")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _carry(files: list[int], latency: float, over: threading.Event) -> None:
    """Until `over`: what is read of either file is written to the other one, `latency` seconds later."""
    others = {files[0]: files[1], files[1]: files[0]}
    waiting: deque[tuple[float, int, bytes]] = deque()  # one latency for all: they are due in the order they came
    poll = select.epoll()
    for file in files:
        poll.register(file, select.EPOLLIN)
    with poll:
        while not over.is_set():
            due = waiting[0][0] - time.monotonic() if waiting else 0.2
            for file, _ in poll.poll(max(due, 0)):
                waiting += [(time.monotonic() + latency, others[file], packet) for packet in _packets(file)]
            while waiting and waiting[0][0] <= time.monotonic():
                _, file, packet = waiting.popleft()
                _write(file, packet)


def _packets(file: int) -> Iterator[bytes]:
    for _ in range(BURST):
        try:
            yield os.read(file, LARGEST)
        except OSError:  # none is there, or the interface is down
            return


def _write(file: int, packet: bytes) -> None:
    try:
        os.write(file, packet)
    except OSError:  # the interface is not up yet, or not any more: a link drops what it cannot deliver
        return


def _ip(namespace: str, command: str) -> None:
    _run("ip", "-n", namespace, *command.split())


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise PierError(f"{' '.join(words)}: {done.stderr.strip()}", "A kernel with network namespaces is needed.")
