from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pier_node.outer.schedule import entry, span
from pier_node.outer.state import PIECE


@given(st.integers(1, 40 * PIECE), st.integers(1, 16))
def test_every_element_is_in_one_fragment(length: int, fragments: int) -> None:
    parts = [span(length, fragments, index) for index in range(fragments)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == length


@given(st.integers(1, 16), st.integers(0, 20 * PIECE))
def test_long_ones_are_alike_and_of_whole_pieces(fragments: int, more: int) -> None:
    length = fragments * PIECE + more
    parts = [span(length, fragments, index) for index in range(fragments)]
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 2 * PIECE
    assert all(part.start % PIECE == 0 for part in parts)


def test_the_whole_model_and_its_first_part_have_the_same_entry() -> None:
    assert [entry("a1", fragment) for fragment in (0, 1, 12)] == ["a1", "a1/1", "a1/12"]
