"""AdamW's moments in shared memory: a program publishes them there, and they survive its death."""

from __future__ import annotations

from collections.abc import Callable

from pier_node.base.shared import SharedVector, Vector

Moments = tuple[Vector, Vector, int]
"""First and second moments, shape [parameters] each, and the number of AdamW steps behind them."""


class SharedMoments:
    """The moments after the last inner steps whose program published any; initially zeros.

    Args:
        length: 0: the program keeps its optimizer to itself.
        recover: returns replacement moments when a program dies while it publishes them; None: zeros.

    Attributes:
        first: shape [parameters].
        second: shape [parameters].
        step: number of AdamW steps behind them.
        torn: the program is publishing them.
        changed: since the program last loaded or published them.
    """

    def __init__(self, length: int, recover: Callable[[], Moments | None]) -> None:
        self.first, self.second = SharedVector(length), SharedVector(length)
        self.step, self.torn, self.changed = 0, False, True
        self._recover = recover

    def accept(self, step: int, changed: bool = False) -> None:
        """Mark the moments as complete, with `step` steps behind them; `changed`: not by the program."""
        self.step, self.torn = step, False
        self.changed |= changed

    def due(self) -> int | None:
        """What the program has to load: moments that are that many steps old, or None, if it has them."""
        due, self.changed = self.step if self.changed else None, False
        return due

    def restore(self) -> None:
        """Replace torn moments by complete ones."""
        first, second, step = self._recover() or (0.0, 0.0, 0)
        self.first.array[:], self.second.array[:] = first, second
        self.accept(step, changed=True)
