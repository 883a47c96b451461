from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pier_node.demo.picture import EIGHTHS, bars

Curve = list[tuple[int, float]]
curves = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20).map(lambda values: list(enumerate(values)))


def test_a_falling_curve() -> None:
    # Logarithmic: from 8 to 1 in 15 eighths of two lines, 5 for each halving.
    assert bars([(0, 8.0), (10, 4.0), (20, 2.0), (30, 1.0)], end=30, width=4, height=2) == ["█▃  ", "██▆▁"]


def test_a_part_of_the_width_for_a_part_of_the_run() -> None:
    rows = bars([(0, 4.0), (50, 2.0)], end=100, width=11, height=1)
    assert rows == ["█████▁"]


def test_nothing_yet() -> None:
    assert bars([], end=100, width=10, height=3) == ["", "", ""]


def test_a_level_curve() -> None:
    assert bars([(0, 2.0), (9, 2.0)], end=9, width=3, height=1) == ["▁▁▁"]


@given(curves, st.integers(1, 40), st.integers(1, 6))
def test_the_drawing_keeps_to_its_box(curve: Curve, width: int, height: int) -> None:
    rows = bars(curve, end=curve[-1][0], width=width, height=height)
    assert len(rows) == height
    assert {len(row) for row in rows} <= {width if curve[-1][0] else 1}
    assert all(letter in EIGHTHS for row in rows for letter in row)
    assert " " not in rows[-1]
