"""That sites of a pipeline add up to it, and where the time of their rounds went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline.cases import iteration_plan

from pier_node.outer.times import Spans, Times
from pier_node.pipeline.iteration_plan import Plan
from pier_node.rounds.progress import Progress
from pier_node.site.pipeline_training import book, lines, share

PLAN = Plan.read(iteration_plan([0, 1, 1, 2], [[0, 1, 3], [0, 2], [0, 2, 3]]), 3)


def test_a_round_that_counts() -> None:
    progress = Progress(tokens=100)
    spans = Spans(1, 0.0, tasks=6.0, computing=4.0, average=1.5, total=0.5, step=0.5)
    book(progress, "a", 60, 10.0, spans, PLAN)
    assert (progress.compute, progress.waited) == (4.5, 5.5)
    assert progress.times == Times(waiting=4.0, exchange=1.5, retry=0.0)
    assert (progress.steps, progress.tokens, progress.tokens_per_second) == (1, 170, 7.0)


@pytest.mark.parametrize(
    ("spans", "compute", "times"),
    [
        (None, 0.0, Times(waiting=10.0)),
        (Spans(1, 0.0, computing=4.0, step=0.5), 0.0, Times(retry=10.0)),
    ],
)
def test_a_round_that_does_not_count_brings_nothing(spans: Spans | None, compute: float, times: Times) -> None:
    progress = Progress(tokens=100, tokens_per_second=7.0, steps=1)
    book(progress, "a", 60, 10.0, spans, None)
    assert (progress.compute, progress.waited, progress.times) == (compute, 10.0 - compute, times)
    assert (progress.steps, progress.tokens, progress.tokens_per_second) == (0, 100, 7.0)


def test_an_outer_round_takes_time_and_no_step() -> None:
    progress = Progress(tokens=100)
    meeting = Plan.read(iteration_plan([0, 1, 1, 2], [], meet=True), 3)
    book(progress, "a", 60, 10.0, Spans(1, 0.0, average=3.0, step=0.5), meeting)
    assert (progress.compute, progress.times) == (0.5, Times(waiting=6.5, exchange=3.0))
    assert (progress.steps, progress.tokens) == (0, 100)


@given(st.integers(1, 100_000))
def test_the_sites_have_done_all_of_an_iteration_together(each: int) -> None:
    parts = [share(PLAN, node, each) for node in PLAN.stages]
    assert abs(sum(parts) - 3 * each) <= len(parts) / 2
    assert min(parts) == parts[1]  # b has one visit, of a path of three


def test_a_transfer_says_how_fast_a_line_is_if_it_is_longer_than_a_round_trip() -> None:
    transfers = {"far": 0.5, "quick": 0.3, "stranger": 1.0}
    assert lines(transfers, {"far": 0.1, "quick": 0.1}, 1_000_000) == {"far": 2_000_000.0}
