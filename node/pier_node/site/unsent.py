"""What a site learnt and no round has taken yet, part by part; and what a lossy codec left of what rounds took.

The worker starts from φ − Δ with Δ the pending pseudo-gradient, so that nothing learnt is lost, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pier_node.base.shared import SharedVector, Vector
from pier_node.outer.schedule import span
from pier_node.outer.state import PIECE


class Pending:
    """Δ that is in no anchor, and the residual of error feedback.

    Args:
        length: parameters.
        fragments: parts that are taken each on its own.
        lossy: whether a codec leaves a residual.

    Attributes:
        delta: Δ, shape [parameters]; zero where there are no tokens.
        tokens: that a fragment's Δ was trained on, one number a fragment.
        residual: what the codec lost of updates so far, shape [parameters]; None with a codec that loses nothing.
    """

    def __init__(self, length: int, fragments: int, lossy: bool) -> None:
        self.delta = SharedVector(length)
        self.tokens = [0] * fragments
        self.residual = SharedVector(length) if lossy else None
        self._offered: tuple[slice, Vector] | None = None

    def restore(self, delta: SharedVector | None, tokens: Sequence[int], residual: SharedVector | None) -> None:
        """What a checkpoint has."""
        if delta is not None:
            self.delta, self.tokens = delta, [*tokens]
        if self.residual is not None and residual is not None:
            self.residual = residual

    def __bool__(self) -> bool:
        return any(self.tokens)

    def learn(self, start: Vector, weights: Vector, tokens: int) -> None:
        """Add what training from `start` to `weights`, both of shape [parameters], has learnt."""
        delta = self.delta.array
        for first in range(0, len(delta), PIECE):
            piece = slice(first, first + PIECE)
            delta[piece] += start[piece] - weights[piece]
        self.tokens = [count + tokens for count in self.tokens]

    def offer(self, part: slice, vector: Vector | None = None) -> tuple[Vector, Vector | None]:
        """What to send of a fragment, and memory for what the codec loses of it, both of its length.

        Args:
            vector: to be sent in place of Δ, the fragment's part of it.
        """
        source = self.delta.array[part] if vector is None else vector
        if self.residual is None:
            return source, None
        error = np.zeros_like(source)  # also what is left when a round takes what was sent before a restart
        self._offered = part, error
        return source + self.residual.array[part], error

    def taken(self, fragment: int) -> None:
        """The anchor has this fragment's Δ; what the codec lost of it is kept."""
        self.delta.array[span(len(self.delta.array), len(self.tokens), fragment)] = 0
        self.tokens[fragment] = 0
        if self.residual is not None and self._offered is not None:
            part, error = self._offered
            self.residual.array[part] = error
            self._offered = None

    def forget(self) -> None:
        """Training went astray: drop all of it."""
        self.delta.array.fill(0)
        self.tokens = [0] * len(self.tokens)
        if self.residual is not None:
            self.residual.array.fill(0)

    def start(self, anchor: Vector) -> SharedVector | None:
        """φ − Δ, where training goes on; None: φ itself, nothing is pending."""
        if not self:
            return None
        start = SharedVector.scratch(len(anchor))
        np.subtract(anchor, self.delta.array, out=start.array)
        return start
