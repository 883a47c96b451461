"""The totals of an attempt, its end, and what comes a moment before a site has begun it, or after it."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline.cases import iteration_plan
from wire.memory_carrier import MemoryNet

from pier_node.base.tasks import Signal
from pier_node.pipeline.iteration_plan import Plan
from pier_node.pipeline.joint import Dispatch, Totals, drop
from pier_node.wire.carrier import DROP, TALLY, BadMessage
from pier_proto.v1.peer_pb2 import Ack, Dropped, Total, Worked

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


async def test_all_are_told_but_those_who_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    net, told = MemoryNet(), dict[str, Dropped]()
    for node in ("beta", "gamma"):

        async def hear(peer: str, notice: Dropped, node: str = node) -> Ack:
            told[node] = notice
            return Ack()

        net.join(node).serve(DROP, hear)
    caplog.set_level(logging.INFO)
    await drop(net.join("alpha"), ("beta", "lost", "gamma"), b"7", "lost", "x" * 5000, 1.0)
    assert told == dict.fromkeys(("beta", "gamma"), Dropped(attempt=b"7", suspect="lost", reason="x" * 1000))
    assert "could not tell lost" in caplog.text


NAME = b"7" * 32


class Here:
    """A site that has begun nothing yet."""

    def __init__(self) -> None:
        self.attempt: Any = None
        self.begun, self.committed, self.news = b"", 2, Signal()
        self._handlers: dict[Any, Any] = {}
        carrier: Any = SimpleNamespace(serve=self._handlers.__setitem__, serve_push=lambda _: None)
        state = (lambda: self.attempt), (lambda: self.begun), (lambda: self.committed)
        self.dispatch = Dispatch(carrier, self._streams, *state, self.news)

    async def _streams(self, _sender: str, _chunks: Any) -> None:
        raise AssertionError("no stream comes here")

    def begin(self) -> None:
        async def tally(sender: str, worked: Worked) -> Total:
            return Total(loss=3.5)

        self.attempt, self.begun = SimpleNamespace(plan=SimpleNamespace(name=NAME), tally=tally), NAME
        self.news.notify()

    async def drop(self, sender: str) -> None:
        await self._handlers[DROP](sender, Dropped(attempt=NAME, suspect="gamma", reason="it is gone"))

    async def tell(self) -> Any:
        return await self._handlers[TALLY]("beta", Worked(attempt=NAME, round=3))


async def test_a_site_that_is_faster_than_this_one_is_answered() -> None:
    here = Here()
    told = asyncio.create_task(here.tell())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not told.done()
    here.begin()
    assert (await told).loss == 3.5


@pytest.mark.parametrize("begun", [True, False])
async def test_what_is_over_is_refused(begun: bool) -> None:
    here = Here()
    if begun:
        here.begin()
        here.attempt = None
    else:
        here.committed = 3
    with pytest.raises(BadMessage, match="that attempt is over"):
        await here.tell()


async def test_an_attempt_that_was_dropped_before_it_began_here_is_not_begun() -> None:
    here = Here()
    plan: Any = SimpleNamespace(name=NAME, stages={"beta": 0, "gamma": 1})
    await here.drop("a stranger")
    assert here.dispatch.dropped(plan) is None
    await here.drop("beta")
    dropped = here.dispatch.dropped(plan)
    assert dropped is not None
    assert (dropped.node, str(dropped)) == ("gamma", "gamma: beta gave up: it is gone")
    assert here.dispatch.dropped(SimpleNamespace(name=b"8" * 32, stages=plan.stages)) is None  # type: ignore[arg-type]
