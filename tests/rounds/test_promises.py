from __future__ import annotations

import asyncio

import pytest
from rounds.cases import Memory, ballot, outer_state, value
from simulation.statements import PlainStatements

from pier_node.base.tasks import run_to_end
from pier_node.rounds.commitments import Cast, Commitments, Promises, Superseded
from pier_proto.v1.peer_pb2 import Handover, Ready

X = value("x", "abc")
VOTE = Cast.of(ballot(3), X)
SHADOW = outer_state("abc", 5)


def promises(found: Commitments | None = None, round: int = 4) -> Promises:
    return Promises(Memory(found=found), "a", round)


def told(of: Promises) -> Ready:
    ready = Ready(node="a", round=5)
    of.announce(ready)
    return ready


async def test_what_binds_a_site_is_announced() -> None:
    made = promises()
    await made.promise(ballot(3), "a")
    assert (told(made).seen, told(made).HasField("voted"), list(told(made).votes)) == (ballot(3), False, ["a"])
    await made.cast(VOTE, SHADOW)
    ready = told(made)
    assert (ready.voted, ready.voted_in, ready.holds) == (X, ballot(3), True)


async def test_it_is_the_same_after_a_restart_but_for_the_result() -> None:
    memory = Memory()
    made = Promises(memory, "a", 4)
    await made.promise(ballot(3), "a")
    await made.cast(VOTE, SHADOW)
    again = Promises(memory, "a", 4)
    assert again.now == made.now
    assert (told(again).voted, told(again).holds) == (X, False)


async def test_a_vote_binds_until_its_round_is_decided() -> None:
    made = promises()
    await made.promise(ballot(3), "a")
    await made.cast(VOTE, SHADOW)
    await made.settle(4)
    assert (made.now.vote, made.shadow) == (VOTE, SHADOW)
    await made.settle(5)
    assert (made.now.vote, made.shadow) == (None, None)


async def test_who_has_lost_a_round_decides_nothing_before_it_has_it_again() -> None:
    made = promises(Commitments.fresh(6, "a"))
    assert (made.lost, made.votes) == (True, frozenset())
    with pytest.raises(Superseded):
        await made.promise(ballot(1), "a")
    await made.settle(5)
    assert made.lost
    await made.settle(6)
    assert (made.lost, made.votes) == (False, frozenset("a"))


async def test_votes_that_were_given_away_stay_away_until_the_next_round() -> None:
    made = promises()
    assert await made.give("b") == {"a"}
    await made.settle(4)
    assert made.votes == frozenset()
    assert await made.give("b") == frozenset()
    assert len(made.now.given) == 1, "nothing is not given"
    await made.settle(5)
    assert made.votes == {"a"}


async def test_what_was_given_and_taken_is_shown_signed() -> None:
    made, base, b = promises(), b"s" * 32, PlainStatements("b")
    taken = b.seal(Handover(node="b", heir="a", round=4, base=base, votes=["b"]))
    await made.take(4, "b", [taken])
    assert await made.give("c") == {"a", "b"}
    shown = made.handovers(base, PlainStatements("a"))
    assert taken in shown
    (ours,) = [b.read(Handover, it) for it in shown if it != taken]
    assert ours == Handover(node="a", heir="c", round=4, base=base, votes=["a", "b"], number=1)


async def test_a_lost_round_does_not_bring_back_votes_that_were_given_away_after_it() -> None:
    memory = Memory(found=Commitments(6, frozenset()))
    made = Promises(memory, "a", 4)
    await made.settle(6)
    assert (made.lost, made.votes) == (False, frozenset())


async def test_who_takes_part_in_an_attempt_keeps_its_votes() -> None:
    made = promises()
    await made.promise(ballot(1), "a")
    assert await made.give("b") == set()
    assert made.votes == {"a"}


async def test_an_attempt_rests_on_the_votes_that_were_announced() -> None:
    made = promises()
    await made.take(4, "b")
    with pytest.raises(Superseded):
        await made.promise(ballot(1), "a")
    await made.promise(ballot(1), "ab")


async def test_what_was_written_counts_though_its_writer_is_cancelled() -> None:
    """Or a site would deny the vote that its disk has, and that a restart would bring back."""
    release = asyncio.Event()

    async def write() -> None:
        await release.wait()
        written.append(1)

    written = list[int]()
    task = asyncio.create_task(run_to_end(write()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    release.set()
    await asyncio.wait([task])
    assert (task.cancelled(), written) == (True, [1])
