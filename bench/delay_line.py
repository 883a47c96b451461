"""A link with latency and loss: a thread carries packets between two kernel devices, late, and drops some of them.

Many kernels come without netem. Here each end of a link is a TUN or TAP device, whose other end is a file of this
process.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

TUN = "/dev/net/tun"
BURST = 64
"""Packets read at once."""
LARGEST = 70_000
TUN_DEVICE, TAP_DEVICE, OFFLOAD_HEADER = 0x0001, 0x0002, 0x4000
_SET_INTERFACE, _NO_INFO = 0x400454CA, 0x1000

Way = Callable[[int, bytes], tuple[int, float] | None]
"""(the file that a packet was read of, the packet) -> the file that it is for, seconds that it is late; None: lost."""


@dataclass
class Line:
    """What a line does, and what it has done.

    Attributes:
        seconds: that a packet is late.
        loss: share of the packets that are lost.
        lost: how many were.
    """

    seconds: float
    loss: float = 0.0
    lost: int = 0


@contextmanager
def device(name: str, kind: int) -> Iterator[int]:
    """The file of a new device, in this process's namespace at first; it goes with the file."""
    file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), kind | _NO_INFO))
        yield file
    finally:
        os.close(file)


@contextmanager
def joined(files: Sequence[int], line: Line, seed: int = 1) -> Iterator[None]:
    """Carry what is read of either of two files to the other one meanwhile; `seed` says which packets are lost."""
    others, dice = {files[0]: files[1], files[1]: files[0]}, random.Random(seed)

    def way(file: int, _packet: bytes) -> tuple[int, float] | None:
        if line.loss and dice.random() < line.loss:
            line.lost += 1
            return None
        return others[file], line.seconds

    with carried(files, way):
        yield


@contextmanager
def carried(files: Sequence[int], way: Way) -> Iterator[None]:
    """Carry what is read of these files meanwhile."""
    over = threading.Event()
    thread = threading.Thread(target=_carry, args=(files, way, over), name="delay line")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _carry(files: Sequence[int], way: Way, over: threading.Event) -> None:
    waiting, numbers = list[tuple[float, int, int, bytes]](), itertools.count()
    poll = select.epoll()
    for file in files:
        poll.register(file, select.EPOLLIN)
    with poll:
        while not over.is_set():
            due = waiting[0][0] - time.monotonic() if waiting else 0.2
            for file, _ in poll.poll(max(due, 0)):
                for packet in _packets(file):
                    if found := way(file, packet):
                        target, seconds = found
                        heapq.heappush(waiting, (time.monotonic() + seconds, next(numbers), target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, file, packet = heapq.heappop(waiting)
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
    except OSError:  # the interface is not up yet, or not any more: a line drops what it cannot deliver
        return
