"""Two votes that no honest node casts convict it, and nothing else does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rounds.cases import CALM, Member, acquainted, ballot, link, outer_state
from simulation.network import Network
from simulation.statements import PlainStatements
from simulation.virtual_time import run

from pier_node.rounds.double_votes import (
    FIRST_PAUSE,
    LAST_PAUSE,
    LOOK,
    contradict,
    double_votes,
    read_double_vote,
    refutes,
    remembers,
)
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Ballot, DoubleVote, Link, Ready, Value, Vote

ONE, OTHER, THIRD = b"1" * 32, b"2" * 32, b"3" * 32
READER = PlainStatements("reader")


def vote(
    number: int, digest: bytes, prior: Ballot | None = None, of: bytes = b"", node: str = "a", round: int = 5
) -> Vote:
    return Vote(node=node, round=round, ballot=ballot(number, "k"), digest=digest, prior=prior, prior_digest=of)


FIRST = vote(2, ONE)
LIES = {
    "one ballot": vote(2, OTHER),
    "no word of the first": vote(3, OTHER),
    "word of an earlier one only": vote(3, OTHER, ballot(1, "k"), THIRD),
    "word of other bits": vote(3, OTHER, ballot(2, "k"), OTHER),
}
TRUTHS = {
    "the same bits": vote(3, ONE),
    "another round": vote(2, OTHER, round=6),
    "another node": vote(2, OTHER, node="b"),
    "word of the first": vote(3, OTHER, ballot(2, "k"), ONE),
    "word of a later one": vote(4, OTHER, ballot(3, "k"), THIRD),
}


@pytest.mark.parametrize("other", LIES.values(), ids=LIES)
def test_a_node_that_votes_twice_is_convicted(other: Vote) -> None:
    assert contradict(FIRST, other)
    assert contradict(other, FIRST)
    signed = PlainStatements("a")
    assert read_double_vote(DoubleVote(one=signed.seal(other), other=signed.seal(FIRST)), READER) == "a"


@pytest.mark.parametrize("other", TRUTHS.values(), ids=TRUTHS)
def test_honest_votes_convict_nobody(other: Vote) -> None:
    assert not contradict(FIRST, other)
    assert not contradict(other, FIRST)
    proof = DoubleVote(one=PlainStatements("a").seal(FIRST), other=PlainStatements(other.node).seal(other))
    with pytest.raises(BadMessage, match="do not contradict each other"):
        read_double_vote(proof, READER)


@given(some.lists(some.tuples(some.integers(1, 3), some.sampled_from([ONE, OTHER, THIRD])), min_size=2, max_size=8))
def test_no_two_votes_of_a_node_that_remembers_its_last_one_contradict(steps: list[tuple[int, bytes]]) -> None:
    votes, number = [FIRST], 2
    for rise, digest in steps:
        number += rise
        votes.append(vote(number, digest, votes[-1].ballot, votes[-1].digest))
    assert not any(contradict(one, other) for one in votes for other in votes)


def test_nobody_can_convict_another_with_votes_that_it_did_not_sign() -> None:
    forged = PlainStatements("b").seal(LIES["one ballot"])
    forged.node = "a"
    with pytest.raises(BadMessage, match="has not signed"):
        read_double_vote(DoubleVote(one=PlainStatements("a").seal(FIRST), other=forged), READER)


def test_two_proofs_of_one_round_convict_who_is_in_both() -> None:
    ours, theirs = link(5, THIRD, ONE, "abl"), link(5, THIRD, OTHER, "cdl")
    assert [it.one.node for it in double_votes(ours, theirs, READER)] == ["l"]
    assert double_votes(ours, link(5, THIRD, OTHER, "cd"), READER) == []
    assert double_votes(ours, ours, READER) == []


def announced(digest: bytes) -> Ready:
    value = Value(origin=ballot(2, "k"), digest=digest, members=["a", "b"])
    return Ready(node="a", round=5, voted=value, voted_in=ballot(2, "k"))


@pytest.mark.parametrize(
    ("other", "does"),
    [
        (vote(2, OTHER, node="b"), True),
        (vote(2, ONE, node="b"), False),
        (vote(2, OTHER, node="c"), False),
        (vote(3, OTHER, node="b"), False),
        (vote(2, OTHER, node="b", round=6), False),
    ],
    ids=["other bits", "the same bits", "no member", "another ballot", "another round"],
)
def test_only_another_members_vote_for_other_bits_refutes(other: Vote, does: bool) -> None:
    assert refutes(other, announced(ONE)) is does


def test_a_vote_remembers_what_its_announcement_said() -> None:
    assert remembers(vote(3, OTHER, ballot(2, "k"), ONE), announced(ONE))
    assert remembers(FIRST, Ready(node="a", round=5))
    assert not remembers(FIRST, announced(ONE))
    assert not remembers(vote(3, OTHER, ballot(2, "k"), OTHER), announced(ONE))
    assert not remembers(vote(3, OTHER, ballot(1, "k"), ONE), Ready(node="a", round=5))


def digest(round: int, side: str) -> bytes:
    return f"{round:03}{side}".encode() * 8


def history(side: str, fork: int, last: int, before: str, after: str) -> list[Link]:
    """The links of a run that was at one until the round `fork`."""
    links = []
    for round in range(last + 1):
        base = digest(round - 1, side if round > fork else "-")
        members = after if round >= fork else before
        links.append(link(round, base, digest(round, side if round >= fork else "-"), members))
    return links


@dataclass
class Scene:
    """Sites a and b that are on two sides of what was a partition; l was on both."""

    network: Network = field(default_factory=lambda: Network(1, CALM))
    convicted: dict[str, list[str]] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    def site(self, name: str, links: list[Link], unheld: int = 0) -> None:
        """Add a site that holds the state of all its links but the last `unheld` ones."""
        last = links[len(links) - 1 - unheld]
        state = outer_state("".join(last.members), round=last.round)
        vars(state)["digest"] = bytes(last.digest)
        self.convicted[name] = []
        member = self.members[name] = Member(self.network, name, state)
        member.rounds.disputes._convict = self._noting(name)
        member.rounds.disputes._proofs.add(links)

    def _noting(self, name: str) -> Callable[[DoubleVote], None]:
        return lambda proof: self.convicted[name].append(proof.one.node)

    async def meet(self) -> dict[str, asyncio.Task[None]]:
        """Let the sites meet; returns the task of each one's rounds."""
        tasks = {}
        for name, member in self.members.items():
            member.meet(*self.members)
            tasks[name] = member.carrier.spawn(member.rounds.run())
        await acquainted(self.members)
        return tasks


@pytest.mark.parametrize(("ours", "theirs"), [(9, 9), (9, 30), (30, 9), (400, 30)])
def test_who_voted_on_both_sides_is_found_on_both(ours: int, theirs: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        scene = Scene()
        scene.site("a", history("a", 7, ours, "abl", "al"))
        scene.site("b", history("b", 7, theirs, "abl", "bl"))
        await scene.meet()
        await asyncio.sleep(60)
        assert {"l"} == {*scene.convicted["a"], *scene.convicted["b"]}
        if ours == theirs:
            assert scene.convicted["a"]
            assert scene.convicted["b"]

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "round 7 was committed twice" in caplog.text
    assert "l voted for both" in caplog.text


def test_a_link_whose_state_was_lost_before_it_was_held_is_no_history(caplog: pytest.LogCaptureFixture) -> None:
    """Found by the hunt, seed 602502: a crash after the link was written and before the state was, everywhere."""

    async def main() -> None:
        scene = Scene()
        scene.site("a", history("a", 9, 9, "abl", "al"), unheld=1)
        scene.site("b", history("b", 9, 9, "abl", "bl"))
        await scene.meet()
        await asyncio.sleep(60)
        assert scene.convicted["a"] == []

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "committed twice" not in caplog.text


def test_a_dispute_about_links_that_the_disk_has_lost_ends_no_site(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        scene = Scene()
        scene.site("a", history("a", 7, 9, "abl", "al"))
        scene.site("b", history("b", 7, 9, "abl", "bl"))
        proofs = scene.members["a"].tools.proofs._path
        proofs.write_bytes(bytes(proofs.stat().st_size))
        rounds = await scene.meet()
        await asyncio.sleep(60)
        assert not rounds["a"].done()

    run(main())
    assert "the dispute with b cannot be settled: " in caplog.text
    assert "proofs.bin is damaged" in caplog.text


def test_a_digest_without_a_proof_convicts_nobody_and_is_asked_about_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        scene = Scene()
        scene.site("a", history("a", 7, 9, "abl", "abl"))
        scene.site("b", history("-", 0, 9, "z", "z"))
        await scene.meet()
        await asyncio.sleep(3 * LAST_PAUSE)
        assert scene.convicted == {"a": [], "b": []}
        pause = scene.members["a"].rounds.disputes._pauses["b"]
        assert pause.seconds == LAST_PAUSE
        assert pause.until > asyncio.get_running_loop().time() - LOOK - FIRST_PAUSE

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "committed twice" not in caplog.text


def test_sites_of_one_history_are_not_asked() -> None:
    async def main() -> None:
        scene = Scene()
        scene.site("a", history("-", 0, 9, "ab", "ab"))
        scene.site("b", history("-", 0, 9, "ab", "ab"))
        await scene.meet()
        await asyncio.sleep(60)
        assert scene.members["a"].rounds.disputes._pauses == {}

    run(main())
