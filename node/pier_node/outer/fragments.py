"""Fragments: contiguous parts of the model that are synced in turn, so that a round sends one part of it.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, section 2.2. A part is a
range of elements of the canonical order, cut where a state is cut into hashed pieces if it is long enough for that.
"""

from __future__ import annotations

from pier_node.outer.state import PIECE


def span(length: int, fragments: int, fragment: int) -> slice:
    """The elements of one fragment; all of them together are [0, length), each once."""
    return slice(_cut(length, fragments, fragment), _cut(length, fragments, fragment + 1))


def entry(node: str, fragment: int) -> str:
    """The key of the ledger that counts a site's tokens in a fragment; fragment 0 stands for a whole model as well."""
    return f"{node}/{fragment}" if fragment else node


def _cut(length: int, fragments: int, index: int) -> int:
    cut = length * index // fragments
    return cut // PIECE * PIECE if length >= fragments * PIECE and index < fragments else cut
