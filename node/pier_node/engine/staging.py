"""Copies between tensors of a device and fp32 ones of the host; for a CUDA device through two halves of pinned memory.

A copy from memory that may be paged out goes through a small pinned buffer of the driver's, by one thread. Here all of
the process's threads fill one half while the device reads the other. Shared vectors are not pinned themselves: they
come and go with the rounds, and pinning one costs as much as copying it several times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

HALF = 1 << 24
"""Bytes of a half: a few milliseconds of a copy, and little enough for the processor's cache."""

Pair = tuple[Tensor, Tensor]
"""A tensor of a device, of any type, and one of the host in fp32, which has its shape."""


def take(pairs: Iterable[Pair]) -> None:
    """Copy from the host, whose memory may change when this returns, to the device."""
    for device, some in groupby(pairs, lambda pair: pair[0].device):
        if device.type == "cuda":
            _staging(device).take(some)
            continue
        for own, host in some:
            own.copy_(host)


def put(pairs: Iterable[Pair]) -> None:
    """Copy to the host, which has everything when this returns."""
    for device, some in groupby(pairs, lambda pair: pair[0].device):
        if device.type == "cuda":
            _staging(device).put(some)
            continue
        for own, host in some:
            host.copy_(own)


def small(pairs: Iterable[Pair], most: int) -> Iterator[Pair]:
    """The same pairs in pieces of at most `most` bytes on the device."""
    for own, host in pairs:
        if own.nbytes <= most:
            yield own, host
        elif (rows := most * len(own) // own.nbytes) == 0:  # one row is too much already
            yield from small(zip(own, host), most)
        else:
            yield from zip(torch.split(own, rows), torch.split(host, rows))


class _Staging:
    """Pinned memory for copies to and from one CUDA device, in the order of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._halves = [torch.empty(HALF, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._halves]  # type: ignore[no-untyped-call]

    def take(self, pairs: Iterable[Pair]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for number, (own, host) in enumerate(small(pairs, HALF)):
            half, free = self._halves[number % 2], self._free[number % 2]
            free.synchronize()
            own.copy_(_like(half, own).copy_(host), non_blocking=True)
            free.record(stream)

    def put(self, pairs: Iterable[Pair]) -> None:
        stream, under_way = torch.cuda.current_stream(self._device), deque[tuple[torch.cuda.Event, Tensor, Tensor]]()
        for number, (own, host) in enumerate(small(pairs, HALF)):
            if len(under_way) == len(self._halves):
                _arrive(*under_way.popleft())
            half, free = self._halves[number % 2], self._free[number % 2]
            free.synchronize()
            staged = _like(half, own).copy_(own, non_blocking=True)
            free.record(stream)
            under_way.append((free, staged, host))
        for each in under_way:
            _arrive(*each)


@cache
def _staging(device: torch.device) -> _Staging:
    return _Staging(device)


def _like(half: Tensor, tensor: Tensor) -> Tensor:
    """Staged memory of a tensor's type and shape: types are converted by the host, so that fewer bytes travel."""
    return half[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _arrive(read: torch.cuda.Event, staged: Tensor, host: Tensor) -> None:
    read.synchronize()
    host.copy_(staged)
