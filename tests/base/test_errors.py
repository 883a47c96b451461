"""What people read when something is wrong."""

from __future__ import annotations

from pier_node.base.errors import PierError


def test_problem_and_remedy_are_two_lines() -> None:
    error = PierError("the disk is full", "Free some space.")
    assert str(error) == "the disk is full\nFree some space."
    assert (error.problem, error.remedy) == ("the disk is full", "Free some space.")


def test_a_remedy_may_be_part_of_the_problem() -> None:
    assert str(PierError("start it again")) == "start it again"
