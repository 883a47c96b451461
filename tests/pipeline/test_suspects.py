"""Whom a planner leaves out, and for how long."""

from __future__ import annotations

from pier_node.pipeline.plan_delivery import MOST, Suspects


def test_a_site_is_left_out_once_and_twice_as_long_each_time_it_fails_again() -> None:
    suspects, number, spans = Suspects(), 1, list[int]()
    for _ in range(5):
        suspects.add("b", number)
        began = number
        while "b" in suspects.of(number):
            number += 1
        spans.append(number - began)
    assert spans == [1, 2, 4, 8, MOST]


def test_who_takes_part_in_what_counts_is_no_suspect_any_more() -> None:
    suspects = Suspects()
    for number in (1, 2, 3):
        suspects.add("b", number)
    suspects.add("c", 3)
    assert suspects.of(3) == {"b", "c"}
    suspects.clear(["a", "b"])
    assert suspects.of(3) == {"c"}
    suspects.add("b", 9)
    assert suspects.of(9) == {"b"}
    assert suspects.of(10) == set()
