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

HALF = 1 << 25
"""Bytes of a half: a millisecond of a copy. With halves of a quarter, an H200 copies at 0.6 of the speed."""
ALIGNED = 64
"""Places are multiples of this, whatever the types of the tensors."""

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


def batches(pairs: Iterable[Pair], most: int) -> Iterator[list[tuple[int, Pair]]]:
    """The same pairs in pieces, with the places of as many of them as there is room for in `most` bytes together."""
    batch, end = list[tuple[int, Pair]](), 0
    for own, host in small(pairs, most):
        if batch and end + own.nbytes > most:
            yield batch
            batch, end = [], 0
        batch.append((end, (own, host)))
        end += -(-own.nbytes // ALIGNED) * ALIGNED
    if batch:
        yield batch


class _Staging:
    """Pinned memory for copies to and from one CUDA device, in the order of its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._halves = [torch.empty(HALF, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._halves]  # type: ignore[no-untyped-call]

    def take(self, pairs: Iterable[Pair]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for number, batch in enumerate(batches(pairs, HALF)):
            half, free = self._halves[number % 2], self._free[number % 2]
            free.synchronize()
            for place, (own, host) in batch:
                own.copy_(_like(half, place, own).copy_(host), non_blocking=True)
            free.record(stream)

    def put(self, pairs: Iterable[Pair]) -> None:
        stream = torch.cuda.current_stream(self._device)
        under_way = deque[tuple[torch.cuda.Event, list[Pair]]]()
        for number, batch in enumerate(batches(pairs, HALF)):
            if len(under_way) == len(self._halves):
                _arrive(*under_way.popleft())
            half, free = self._halves[number % 2], self._free[number % 2]
            free.synchronize()
            staged = [_like(half, place, own).copy_(own, non_blocking=True) for place, (own, _) in batch]
            free.record(stream)
            under_way.append((free, [*zip(staged, (host for _, (_, host) in batch))]))
        for each in under_way:
            _arrive(*each)


@cache
def _staging(device: torch.device) -> _Staging:
    return _Staging(device)


def _like(half: Tensor, place: int, tensor: Tensor) -> Tensor:
    """Staged memory of a tensor's type and shape: types are converted by the host, so that fewer bytes travel."""
    return half[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _arrive(read: torch.cuda.Event, pairs: Iterable[Pair]) -> None:
    read.synchronize()
    for staged, host in pairs:
        host.copy_(staged)
