"""A colour for every microbatch, alike in the terminal, in SVG and on a page."""

from __future__ import annotations

import colorsys

GOLDEN = 0.618033988749895
"""Turns of the colour wheel from one microbatch to the next: neighbours never look alike."""


def colour(microbatch: int, darker: bool = False) -> str:
    """As #rrggbb; a backward is drawn darker than its forward."""
    red, green, blue = colorsys.hls_to_rgb(microbatch * GOLDEN % 1.0, 0.42 if darker else 0.64, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
