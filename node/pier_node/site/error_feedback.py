"""Unsent updates: what a site learned that no round has taken yet, per fragment, and the residual of a lossy codec.

Workers start from φ − Δ, where Δ is the unsent pseudo-gradient. So nothing that was learned is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.outer.codec.interface import Rounded
from pier_node.outer.mean import Update, Values
from pier_node.outer.schedule import span
from pier_node.outer.state import in_pieces


class UnsentUpdate:
    """The unsent pseudo-gradient Δ, which is in no anchor yet, and the residual of error feedback.

    Args:
        length: number of parameters.
        fragments: number of fragments; each is taken on its own.
        lossy: whether the codec leaves a residual.
        decay: the part of the residual that is offered again; less than 1 forgets old errors (arXiv 2508.15706).
        rounded: keep the residual as bf16.

    Attributes:
        delta: Δ, shape [parameters]; zero where there are no tokens.
        tokens: tokens that each fragment's Δ was trained on, one number per fragment.
        residual: what the codec has lost of updates so far, shape [parameters], or half of that if it is rounded, with
            two bf16 in the place of an fp32; None with a lossless codec.
    """

    def __init__(self, length: int, fragments: int, lossy: bool, decay: float = 1.0, *, rounded: bool = False) -> None:
        self.delta = SharedVector(length)
        self.tokens = [0] * fragments
        self._rounded = rounded
        self.residual = SharedVector((length + 1) // 2 if rounded else length) if lossy else None
        self._decay = np.float32(decay)
        self._offered: tuple[slice, Values] | None = None

    def restore(self, delta: SharedVector | None, tokens: Sequence[int], residual: SharedVector | None) -> None:
        """Restore the values from a checkpoint."""
        if delta is not None:
            self.delta, self.tokens = delta, [*tokens]
        if self.residual is not None and residual is not None:
            self.residual = residual

    def __bool__(self) -> bool:
        return any(self.tokens)

    def learn(self, start: Vector, weights: Vector, tokens: int) -> bool:
        """Add what training from `start` to `weights` has learned, [parameters] each. Returns whether they differ."""
        delta = self.delta.array

        def add(piece: slice) -> bool:
            moved = start[piece] - weights[piece]
            delta[piece] += moved
            return bool(moved.any())

        changed = any(in_pieces(add, len(delta)))
        self.tokens = [count + tokens for count in self.tokens]
        return changed

    def offer(self, part: slice, tokens: int, vector: Vector | None = None) -> Update:
        """What to send for a fragment: views of Δ and the residual, and a buffer for what the codec loses.

        Args:
            tokens: the update's weight.
            vector: the vector to send for the fragment instead of Δ.
        """
        source = self.delta.array[part] if vector is None else vector
        if self.residual is None:
            return Update(source, tokens)
        length = len(source)
        error: Values = Rounded(np.zeros(length, np.uint16)) if self._rounded else np.zeros(length, np.float32)
        self._offered = part, error
        return Update(source, tokens, error, self._lost(self.residual, part), self._decay)

    def _lost(self, residual: SharedVector, part: slice) -> Values:
        return Rounded(residual.array.view(np.uint16)[part]) if self._rounded else residual.array[part]

    def taken(self, fragment: int) -> None:
        """Clear this fragment's Δ, which is now in the anchor; keep what the codec lost of it.

        If it was offered before a restart, that is not known any more, and the residual that went with it is dropped.
        """
        part = span(len(self.delta.array), len(self.tokens), fragment)
        self.delta.array[part] = 0
        self.tokens[fragment] = 0
        if self.residual is not None:
            sent, error = self._offered or (part, None)
            lost = self._lost(self.residual, sent)

            def keep(piece: slice) -> None:
                lost[piece] = 0.0 if error is None else error[piece]

            in_pieces(keep, len(lost))
            self._offered = None

    def forget(self) -> None:
        """Training diverged: drop everything."""
        self.delta.array.fill(0)
        self.tokens = [0] * len(self.tokens)
        if self.residual is not None:
            self.residual.array.fill(0)

    def start(self, anchor: Vector) -> SharedVector | None:
        """φ − Δ, the weights from which training continues; None: φ itself, because nothing is unsent."""
        if not self:
            return None
        start, delta = SharedVector.scratch(len(anchor)), self.delta.array
        in_pieces(lambda piece: np.subtract(anchor[piece], delta[piece], out=start.array[piece]), len(anchor))
        return start
