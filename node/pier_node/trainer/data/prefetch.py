"""Batches ahead of their steps: while a step runs, a thread makes the batch of the next one.

A batch is a function of the step alone (corpus.py, `Windows`). So nothing has to be saved, and a batch of a step that
does not come, because the site has caught up with others, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pier_node.trainer.data.corpus import Batch

Rows = tuple[Tensor, Tensor]
"""Inputs and targets, [sequences, context] each, on the host."""


class Prefetch:
    """The batches of a worker. Its thread ends with the process.

    Args:
        make: returns the worker's rows of a step whose site trains on so many sequences; raises what it likes.
        device: where they are needed. For a CUDA device they are in pinned memory, from which copies do not block.
    """

    def __init__(self, make: Callable[[int, int], Batch], device: torch.device) -> None:
        self._make, self._device = make, device
        self._thread = ThreadPoolExecutor(1, "batches", self._begin)
        self._next: tuple[tuple[int, int], Future[Rows]] | None = None

    def rows(self, step: int, sequences: int) -> Rows:
        """The rows of a step; the thread begins with those of the step after it. Raises what `make` raises."""
        ahead, self._next = self._next, None
        # On a busy machine the thread may not have begun: then there is nothing to wait for.
        if ahead is not None and ahead[0] == (step, sequences) and not ahead[1].cancel():
            rows = ahead[1].result()
        else:
            rows = self._made(step, sequences)
        following = step + 1, sequences
        self._next = following, self._thread.submit(self._made, *following)
        return rows

    def _begin(self) -> None:
        if self._device.type == "cuda":  # a thread begins with the first device, and would take memory on it
            torch.cuda.set_device(self._device)

    def _made(self, step: int, sequences: int) -> Rows:
        inputs, targets = (torch.from_numpy(part) for part in self._make(step, sequences))
        if self._device.type == "cuda":
            return inputs.contiguous().pin_memory(), targets.contiguous().pin_memory()
        return inputs, targets
