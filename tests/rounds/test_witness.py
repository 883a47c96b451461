"""The witness: one vote a round, for a member of the newest state that was proved to it, across restarts too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rounds.cases import link, outer_state
from simulation.statements import PlainStatements

from pier_node.base.errors import PierError
from pier_node.rounds import witness as module
from pier_node.rounds.proofs import Proofs, Trusted, alone, follow
from pier_node.rounds.witness import WITNESS_FILE, Witness, vote_of_witness
from pier_node.wire.carrier import BadMessage, PeerLost
from pier_proto.v1.peer_pb2 import Ballot, DoubleVote, Handover, Link, Vote, WitnessReply, WitnessRequest

W, READER = "w", PlainStatements("reader", "w")
FIRST = outer_state("a")


def digest(round: int) -> bytes:
    return FIRST.digest if round == 0 else round.to_bytes(4, "big") * 8


def step(round: int, members: str, group: str = "", **more: object) -> Link:
    return link(round, digest(round - 1), digest(round), members, group, **more)  # type: ignore[arg-type]


CHAIN = [alone(FIRST, b"", PlainStatements("a")), step(1, "ab"), step(2, "ab"), step(3, "ab")]


def request(links: int, of: int | None = None) -> WitnessRequest:
    """With the first links, for the round after the last of them, or after another one."""
    return WitnessRequest(base=digest(links - 1 if of is None else of), proof=CHAIN[:links])


@pytest.fixture
def here(tmp_path: Path) -> Callable[[], Witness]:
    return lambda: Witness(tmp_path / WITNESS_FILE, W, PlainStatements(W, W))


def heir(reply: WitnessReply) -> str:
    return READER.read(Handover, reply.handover).heir if reply.HasField("handover") else ""


def test_the_first_member_that_asks_has_the_vote_of_a_round_and_restarts_change_nothing(
    here: Callable[[], Witness],
) -> None:
    witness = here()
    first = witness.answer("b", request(2), "a")
    given = READER.read(Handover, first.handover)
    assert given == Handover(node=W, heir="b", round=1, base=digest(1), votes=[W], number=1)
    for again in (witness, here()):
        assert again.answer("b", request(2), "a").handover.statement == first.handover.statement
        assert again.answer("a", request(2), "a") == WitnessReply(trusted=2, reason="b has its vote for round 2")
    assert heir(witness.answer("a", request(3), "a")) == "a", "of the next round it has another vote"


def test_what_it_gives_makes_a_quorum_of_half(here: Callable[[], Witness]) -> None:
    signed = here().answer("b", request(2), "a").handover
    trusted = Trusted(1, digest(1), ("a", "b"))
    alone_with_it = step(2, "b", handovers=[signed])
    assert follow(trusted, alone_with_it, READER).members == ("b",)
    with pytest.raises(BadMessage, match="without a majority"):
        follow(trusted, step(2, "b"), READER)
    with pytest.raises(BadMessage, match="without a majority"):
        follow(trusted, step(2, "a"), READER)
    with pytest.raises(BadMessage, match="without a majority"):
        follow(trusted, step(2, "a", handovers=[signed]), READER)


def test_who_is_behind_or_was_no_member_gets_nothing(here: Callable[[], Witness]) -> None:
    witness = here()
    assert witness.answer("c", request(2), "a") == WitnessReply(trusted=2, reason="c has no vote after round 1")
    assert heir(witness.answer("a", request(3), "a")) == "a"
    assert witness.answer("b", request(2), "a") == WitnessReply(trusted=3)
    assert witness.answer("b", request(0, of=9), "a") == WitnessReply(trusted=3)


def test_the_heir_of_a_member_may_have_it(here: Callable[[], Witness]) -> None:
    witness, asked = here(), request(2)
    handover = Handover(node="a", heir="c", round=1, base=digest(1), votes=["a"], number=1)
    asked.handovers.append(PlainStatements("a").seal(handover))
    assert heir(witness.answer("a", asked, "a")) == "", "which has none any more"
    assert heir(witness.answer("c", asked, "a")) == "c"


def test_nobody_can_use_up_votes_with_made_up_rounds(here: Callable[[], Witness]) -> None:
    witness = here()
    with pytest.raises(BadMessage, match="without a majority"):
        witness.answer("c", WitnessRequest(base=digest(7), proof=[step(7, "c")]), "a")
    forged = step(1, "ab")
    forged.votes[1].signature = b"forged"
    with pytest.raises(BadMessage, match="has not signed"):
        witness.answer("b", WitnessRequest(base=digest(1), proof=[CHAIN[0], forged]), "a")
    assert heir(witness.answer("a", request(2), "a")) == "a"


def test_a_vote_that_cannot_be_written_down_is_not_given(here: Callable[[], Witness], tmp_path: Path) -> None:
    witness = here()
    (tmp_path / f"{WITNESS_FILE}.tmp").mkdir()
    for asked in (request(2), request(2, of=0)):
        with pytest.raises(PierError, match="cannot write down the vote of the witness"):
            witness.answer("b", asked, "a")
    (tmp_path / f"{WITNESS_FILE}.tmp").rmdir()
    assert heir(witness.answer("a", request(2), "a")) == "a"


def test_if_its_file_is_damaged_it_gives_no_vote(here: Callable[[], Witness], tmp_path: Path) -> None:
    here().answer("b", request(2), "a")
    (tmp_path / WITNESS_FILE).write_bytes(b"{")
    assert "cannot know whether it gave its vote" in here().answer("a", request(3), "a").reason


def test_if_its_file_is_gone_it_gives_no_vote(here: Callable[[], Witness], tmp_path: Path) -> None:
    here().answer("b", request(2, of=0), "a")
    assert (tmp_path / WITNESS_FILE).exists(), "from the first question on"
    (tmp_path / WITNESS_FILE).unlink()
    again = Witness(tmp_path / WITNESS_FILE, W, PlainStatements(W, W), asked=True)
    assert "cannot know whether it gave its vote" in again.answer("a", request(2), "a").reason


def test_of_nodes_that_voted_twice_it_remembers_members_and_those_it_was_just_told(tmp_path: Path) -> None:
    """Anybody can make up nodes and have them vote twice."""
    statements = PlainStatements(W, W)
    witness = Witness(tmp_path / WITNESS_FILE, W, statements)
    for node in ("b", "x", "y", "z"):
        votes = [Vote(node=node, round=2, ballot=Ballot(number=1, leader=node), digest=bytes([it])) for it in (1, 2)]
        one, other = map(PlainStatements(node).seal, votes)
        told = DoubleVote(one=one, other=other)
        witness.answer("a", WitnessRequest(base=digest(2), proof=CHAIN, double_votes=[told]), "a")
    assert {*statements.convicted} == {"b", "z"}


def test_votes_of_nodes_that_voted_twice_are_not_needed(here: Callable[[], Witness]) -> None:
    """Of a, b, c and d, d is convicted, so a and b were enough for round 2."""
    base = Ballot(number=1, leader="d")
    votes = [Vote(node="d", round=2, ballot=base, digest=bytes([it]) * 32) for it in (1, 2)]
    one, other = map(PlainStatements("d").seal, votes)
    joined = link(1, digest(0), digest(1), "abcd", "a")
    asked = WitnessRequest(base=digest(2), proof=[CHAIN[0], joined, step(2, "ab")])
    witness = here()
    with pytest.raises(BadMessage, match="without a majority"):
        witness.answer("b", asked, "a")
    asked.double_votes.append(DoubleVote(one=one, other=other))
    assert heir(witness.answer("b", asked, "a")) == "b"


def test_who_voted_twice_gets_no_vote(here: Callable[[], Witness]) -> None:
    votes = [Vote(node="b", round=2, ballot=Ballot(number=1, leader="b"), digest=bytes([it]) * 32) for it in (1, 2)]
    one, other = map(PlainStatements("b").seal, votes)
    asked = request(2)
    asked.double_votes.append(DoubleVote(one=one, other=other))
    assert here().answer("b", asked, "a").reason == "b has no vote after round 1"


@given(
    some.lists(some.tuples(some.sampled_from("abcd"), some.integers(0, 4), some.integers(0, 3), some.booleans())),
)
def test_of_each_round_one_site_has_the_vote(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[str, int, int, bool]]
) -> None:
    """Whoever asks for whatever, with whatever proof, and whenever the witness is started again."""
    file, given_to = tmp_path_factory.mktemp("witness") / WITNESS_FILE, dict[int, str]()
    witness = Witness(file, W, PlainStatements(W, W))
    for sender, links, of, restarts in asked:
        witness = Witness(file, W, PlainStatements(W, W)) if restarts else witness
        if found := heir(witness.answer(sender, request(links, of), "a")):
            assert found == sender
            assert sender in CHAIN[of].members
            assert given_to.setdefault(of, sender) == sender


async def test_a_site_sends_as_much_of_its_proof_as_is_needed(
    here: Callable[[], Witness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness, proofs, asked = here(), Proofs(tmp_path / "proofs.bin"), list[int]()
    monkeypatch.setattr(module, "PROOF", 1)
    proofs.add(CHAIN)

    async def ask(request: WitnessRequest) -> WitnessReply:
        asked.append(len(request.proof))
        return witness.answer("b", request, "a")

    signed = await vote_of_witness(ask, WitnessRequest(base=digest(3)), 3, proofs.after)
    assert READER.read(Handover, signed).heir == "b"
    assert asked == [0, 1, 1, 1, 1]
    with pytest.raises(PeerLost, match="it knows of round 3, and this site is at round 2"):
        await vote_of_witness(ask, WitnessRequest(base=digest(2)), 2, proofs.after)
    with pytest.raises(PeerLost, match="this site cannot prove what was committed after round 3"):
        await vote_of_witness(ask, WitnessRequest(base=digest(4)), 4, lambda _: [])
