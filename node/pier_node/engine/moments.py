"""AdamW's moments in files that daemon and program map: a program publishes them there, and they survive its death.

They are written for checkpoints and read after a death. In between the kernel may have their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pier_node.base.durable import unwritable
from pier_node.base.shared import SharedVector, Vector

Moments = tuple[Vector, Vector, int]
"""First and second moments, shape [parameters] each, and the number of AdamW steps behind them."""


class SharedMoments:
    """The moments after the last inner steps whose program published any; initially zeros.

    Args:
        length: 0: the program keeps its optimizer to itself.
        folder: of the files, which have no names.
        recover: returns replacement moments when a program dies while it publishes them; None: zeros.

    Attributes:
        first: shape [parameters].
        second: shape [parameters].
        step: number of AdamW steps behind them.
        torn: the program is publishing them.
        changed: since the program last loaded or published them.

    Raises:
        PierError: the disk is full or failing.
    """

    def __init__(self, length: int, folder: Path | None, recover: Callable[[], Moments | None]) -> None:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self.first, self.second = SharedVector(length, folder), SharedVector(length, folder)
        except OSError as error:
            raise unwritable(f"cannot reserve room for the optimizer's moments in {folder}", error) from error
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
