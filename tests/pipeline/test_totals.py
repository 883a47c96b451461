"""The totals of an attempt: replicas count by their microbatches, strangers not at all."""

from __future__ import annotations

import pytest
from pipeline.cases import iteration_plan

from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import Totals
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Worked

PLAN = Plan.read(iteration_plan([0, 1, 1, 2], [[0, 1], [0, 2], [0, 1]]), 3)
OUTER = Plan.read(iteration_plan([0, 1, 1], [], [], meet=True), 3)


def test_there_is_a_total_once_all_have_worked() -> None:
    totals = Totals(PLAN)
    for node, square, loss in (("a", 1.0, 7.5), ("b", 2.0, 0.0), ("c", 3.5, 0.0)):
        assert totals.all() is None
        totals.add(node, Worked(attempt=PLAN.name, square=square, loss=loss))
    totals.add("c", Worked(attempt=PLAN.name, square=99.0))
    totals.add("d", Worked(attempt=PLAN.name, square=5.0))
    found = totals.all()
    assert found is not None
    assert (found.square, found.loss) == (1.0 + (2 * 2.0 + 3.5) / 3, 2.5)  # nobody visits stage 2


def test_a_stranger_is_refused() -> None:
    with pytest.raises(BadMessage, match="takes no part"):
        Totals(PLAN).add("e", Worked())


def test_an_outer_round_says_which_stages_have_moved_and_to_what() -> None:
    totals = Totals(OUTER)
    for node, digest in (("a", b""), ("b", b"x" * 32), ("c", b"x" * 32)):
        totals.add(node, Worked(attempt=OUTER.name, digest=digest))
    found = totals.all()
    assert found is not None
    assert ([*found.moved], [*found.digests]) == ([1], [b"x" * 32])


@pytest.mark.parametrize("digest", [b"y" * 32, b""])
def test_replicas_that_differ_are_refused(digest: bytes) -> None:
    totals = Totals(OUTER)
    totals.add("b", Worked(digest=b"x" * 32))
    with pytest.raises(BadMessage, match="c and b have other bits of stage 1"):
        totals.add("c", Worked(digest=digest))


def test_pairs_of_replicas_may_differ_from_others() -> None:
    plan = Plan.read(iteration_plan([0, 0, 0, 0], [], [], meet=True), 1)
    pair, other = plan.group("a", pairs=True), [node for node in "abcd" if node not in plan.group("a", pairs=True)]
    told = []
    for digest in (b"x" * 32, b"y" * 32):
        totals = Totals(plan, pairs=True)
        for node in "abcd":
            totals.add(node, Worked(attempt=plan.name, digest=digest if node in pair else b"z" * 32))
        found = totals.all()
        assert found is not None
        assert [*found.moved] == [0]
        told += [*found.digests]
    assert len({*told}) == 2, "the name of the attempt covers what each pair has"
    totals = Totals(plan, pairs=True)
    totals.add(other[0], Worked(digest=b"x" * 32))
    with pytest.raises(BadMessage, match=f"{other[1]} and {other[0]} have other bits"):
        totals.add(other[1], Worked(digest=b"y" * 32))


def test_pairs_are_drawn_with_the_seed_of_the_run() -> None:
    message = iteration_plan([0] * 8, [], [], meet=True)
    drawn = {
        seed: tuple(Plan.read(message, 1, seed).group(node, pairs=True)[0] for node in "abcdefgh") for seed in range(9)
    }
    assert len({*drawn.values()}) > 5
