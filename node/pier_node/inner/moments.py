"""AdamW's moments in shared memory: what survives the death of the workers."""

from __future__ import annotations

from collections.abc import Callable

from pier_node.shared import SharedVector, Vector

Moments = tuple[Vector, Vector, int]
"""First and second moments, shape [parameters] each, and the AdamW steps behind them."""


class SharedMoments:
    """The moments after the last job that published any; zeros at first.

    Args:
        recover: where they come from when a worker dies while it publishes them; None from it: zeros.

    Attributes:
        first: shape [parameters].
        second: shape [parameters].
        step: AdamW steps behind them.
        torn: a job is publishing them.
    """

    def __init__(self, length: int, recover: Callable[[], Moments | None]) -> None:
        self.first, self.second = SharedVector(length), SharedVector(length)
        self.step, self.torn = 0, False
        self._recover = recover

    def accept(self, step: int) -> None:
        """They are whole, with `step` steps behind them."""
        self.step, self.torn = step, False

    def restore(self) -> None:
        """Make torn moments whole."""
        first, second, step = self._recover() or (0.0, 0.0, 0)
        self.first.array[:], self.second.array[:] = first, second
        self.accept(step)
