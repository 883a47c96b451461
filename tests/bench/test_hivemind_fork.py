from __future__ import annotations

import pytest
from rich.console import Console

from bench.hivemind_fork import _hivemind_outcome, of_pier, table
from bench.hivemind_fork_peers import Survivor

ALLOWED = [["round 3 committed, group of 2"] * 2, ["round 3 committed, group of 3"] * 2]
"""The dead site's update counts nowhere, or everywhere: all of it may have arrived."""


def outcome_of(*digests: str) -> bool:
    survivors = [Survivor(rank, "success", 1.5, digest, 1.0) for rank, digest in enumerate(digests)]
    return _hivemind_outcome(0.5, 2.0, survivors).same


def test_bits_are_the_same_or_not() -> None:
    assert outcome_of("a" * 64, "a" * 64)
    assert not outcome_of("a" * 64, "b" * 64)


def test_a_fork_is_shown_as_one() -> None:
    survivors = [Survivor(0, "success", 1.25, "a" * 64, 1.0), Survivor(1, "success", 1.5, "b" * 64, 1.0)]
    console = Console(width=160, record=True)
    console.print(table([_hivemind_outcome(0.5, 2.0, survivors)]))
    shown = console.export_text()
    for words in ("1.00 s into 2.00 s", "mean 1.2500, aaaaaaaa", "mean 1.5000, bbbbbbbb", " NO "):
        assert words in shown


@pytest.mark.processes
def test_killed_in_the_middle_pier_leaves_equal_weights() -> None:
    outcome = of_pier("hivemind")
    assert outcome.same
    assert outcome.said in ALLOWED
