from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pier_coordinator.runs.series import Series, rounded

PLACES = st.floats(-1e9, 1e12, allow_nan=False)
VALUES = st.floats(-1e6, 1e6, allow_nan=False)


def filled(limit: int, pairs: list[tuple[float, float]]) -> Series:
    series = Series(limit)
    for stamp, (place, value) in enumerate(pairs, start=1):
        series.add(place, value, stamp)
    return series


@given(st.lists(st.tuples(PLACES, VALUES), min_size=1, max_size=200), st.integers(3, 40))
def test_it_never_grows_and_keeps_the_least_and_the_greatest_value(
    pairs: list[tuple[float, float]], limit: int
) -> None:
    series = filled(limit, pairs)
    points = series.points()
    assert 0 < len(series) <= limit
    assert min(points["min"]) == rounded(min(value for _, value in pairs))
    assert max(points["max"]) == rounded(max(value for _, value in pairs))
    assert points["x"] == sorted(set(points["x"]))


@given(st.lists(st.tuples(PLACES, VALUES), min_size=1, max_size=60), st.randoms())
def test_the_order_in_which_values_come_does_not_matter(pairs: list[tuple[float, float]], dice: object) -> None:
    shuffled = list(pairs)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = filled(8, pairs).points(), filled(8, shuffled).points()
    assert one["x"] == other["x"]
    assert one["min"] == other["min"]
    assert one["max"] == other["max"]


def test_a_place_next_to_zero_stays_below_it_however_wide_points_become() -> None:
    points = filled(3, [(5.0, 0.0), (6.0, 0.0), (7.0, 0.0), (-5e-324, 1.0), (8.0, 0.0)]).points()
    assert (points["x"], points["max"]) == ([-4.0, 4.0, 8.0], [1.0, 0.0, 0.0])


def test_a_small_series_is_kept_as_it_is() -> None:
    points = filled(10, [(1, 5.0), (3, 2.0), (2, 4.0)]).points()
    assert points["x"] == [1.0, 2.0, 3.0]
    assert points["mean"] == points["min"] == points["max"] == [5.0, 4.0, 2.0]
    assert points["width"] == 1.0


def test_neighbours_are_merged_when_there_are_too_many() -> None:
    points = filled(4, [(place, float(place)) for place in range(5)]).points()
    assert points == {
        "width": 2.0,
        "reset": True,
        "x": [0.0, 2.0, 4.0],
        "mean": [0.5, 2.5, 4.0],
        "min": [0.0, 2.0, 4.0],
        "max": [1.0, 3.0, 4.0],
    }


def test_a_mean_counts_every_value_once_however_often_it_was_merged() -> None:
    series = filled(3, [(place, 1.0 if place < 900 else 2.0) for place in range(1000)])
    assert math.isclose(sum(series.means()) / len(series), 1.0, rel_tol=0.3)
    assert series.last() is not None


def test_what_is_not_known_or_not_finite_leaves_no_trace() -> None:
    series = Series(5)
    for value in (None, math.nan, math.inf, -math.inf):
        series.add(1, value, 1)
    for place in (math.inf, math.nan, 1e300):
        series.add(place, 1.0, 1)
    assert len(series) == 0
    assert series.last() is None


def test_only_points_that_changed_are_told_again() -> None:
    series = filled(10, [(1, 1.0), (2, 2.0)])
    series.add(2, 4.0, 7)
    series.add(3, 3.0, 8)
    told = series.points(since=2)
    assert told["x"] == [2.0, 3.0]
    assert told["mean"] == [3.0, 3.0]
    assert not told["reset"]


def test_after_merging_everything_is_told_again() -> None:
    series = filled(3, [(1, 1.0), (2, 2.0), (3, 3.0)])
    series.add(4, 4.0, 9)
    assert series.points(since=8)["reset"]
    assert series.points(since=8)["x"] == [0.0, 2.0, 4.0]
    assert not series.points(since=9)["reset"]


def test_numbers_are_rounded_to_what_a_screen_shows() -> None:
    assert rounded(1.23456789) == 1.23457
    assert rounded(math.nan) is None
    assert rounded(None) is None
