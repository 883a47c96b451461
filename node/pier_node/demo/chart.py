"""A curve in a few lines of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"


def bars(curve: Sequence[tuple[int, float]], end: int, width: int, height: int) -> list[str]:
    """Lines of text, the top one first: a bar for each of `width` parts of the steps 0..end that are done.

    Each bar shows the last value known at its step, on a logarithmic scale on which the lowest value of all is one
    eighth of a line high.
    """
    if not curve:
        return [""] * height
    columns = curve[-1][0] * (width - 1) // max(end, 1) + 1
    values = [_value_at(curve, column * end / max(width - 1, 1)) for column in range(columns)]
    low, high = min(value for _, value in curve), max(value for _, value in curve)
    scale = (8 * height - 1) / math.log(high / low) if high > low else 0.0
    eighths = [1 + round(math.log(value / low) * scale) for value in values]
    return ["".join(EIGHTHS[min(max(level - 8 * line, 0), 8)] for level in eighths) for line in reversed(range(height))]


def _value_at(curve: Sequence[tuple[int, float]], step: float) -> float:
    known = [value for at, value in curve if at <= step]
    return known[-1] if known else curve[0][1]
