"""Who trusts one state follows signed votes to a later one, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rounds.cases import ballot, link, outer_state
from simulation.statements import PlainStatements

from pier_node.rounds.certificate import Trusted, alone, essential, follow, plan_name
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Handover, Link, Signed, Vote

READER = PlainStatements("reader")


def digest(round: int) -> bytes:
    return round.to_bytes(4, "big") * 8


def step(round: int, members: str, group: str = "", **more: object) -> Link:
    """From the state of the round before to that of `round`."""
    return link(round, digest(round - 1), digest(round), members, group, **more)  # type: ignore[arg-type]


def led(trusted: Trusted, *links: Link) -> Trusted:
    for it in links:
        trusted = follow(trusted, it, READER)
    return trusted


def trusted(round: int, members: str) -> Trusted:
    return Trusted(round, digest(round), tuple(members))


def given(giver: str, heir: str, round: int, votes: str = "") -> Signed:
    handover = Handover(node=giver, heir=heir, round=round, base=digest(round), votes=votes or giver, number=1)
    return PlainStatements(giver).seal(handover)


# --- what is believed ------------------------------------------------------------------------------


def test_a_chain_leads_through_members_that_change() -> None:
    """One site begins, others come, the first goes: at each step a majority of those before has voted."""
    chain = [step(2, "ab"), step(5, "abc"), step(6, "bc"), step(9, "bcd"), step(12, "cd")]
    assert led(trusted(1, "a"), *chain) == trusted(12, "cd")


def test_rounds_with_the_same_members_are_skipped() -> None:
    assert led(trusted(3, "abc"), step(4000, "abc", "ac")) == trusted(4000, "abc")


def test_a_newcomer_begins_with_the_founder() -> None:
    """It trusts nothing but who began the run."""
    founder, first = Trusted(-1, b"", ("a",)), outer_state("a")
    beginning = alone(first, b"", PlainStatements("a"))
    believed = led(founder, beginning)
    assert believed == Trusted(0, first.digest, ("a",))
    assert led(believed, link(1, first.digest, digest(1), "ab"), step(2, "ab")) == trusted(2, "ab")
    with pytest.raises(BadMessage, match="without a majority"):
        led(Trusted(-1, b"", ("b",)), beginning)


def test_of_an_even_split_the_side_with_the_lowest_id_is_believed() -> None:
    assert led(trusted(1, "abcd"), step(2, "ab")) == trusted(2, "ab")
    with pytest.raises(BadMessage, match="without a majority of the members of round 1"):
        led(trusted(1, "abcd"), step(2, "cd"))


def test_votes_that_were_handed_over_count() -> None:
    handed = step(2, "a", handovers=[given("b", "a", 1)])
    assert led(trusted(1, "abc"), handed) == trusted(2, "a")


def test_a_vote_in_limbo_counts_with_giver_and_heir() -> None:
    lost = step(2, "bc", handovers=[given("c", "b", 1)])
    assert led(trusted(1, "abc"), lost) == trusted(2, "bc")


# --- what is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handovers",
    [[], [given("b", "c", 1)], [given("b", "a", 0)], [given("c", "a", 1, "b")]],
    ids=["nothing", "to another", "of an earlier round", "by who never had it"],
)
def test_votes_that_nobody_handed_over_do_not(handovers: list[Signed]) -> None:
    with pytest.raises(BadMessage, match="without a majority"):
        led(trusted(1, "abc"), step(2, "a", handovers=handovers))


def test_a_handover_that_was_changed_is_refused() -> None:
    forged = given("b", "a", 1)
    forged.statement = Handover(node="b", heir="a", round=1, base=digest(1), votes="bc").SerializeToString()
    with pytest.raises(BadMessage, match="a Handover that b has not signed"):
        led(trusted(1, "abc"), step(2, "a", handovers=[forged]))


@pytest.mark.parametrize("group", ["a", "c", "az", "xyz"])
def test_too_few_of_the_members_before_prove_nothing(group: str) -> None:
    with pytest.raises(BadMessage, match="without a majority"):
        led(trusted(1, "abc"), step(2, group))


def test_an_invented_round_far_ahead_proves_nothing() -> None:
    with pytest.raises(BadMessage, match="a proof of round 5000 without a majority of the members of round 1"):
        led(trusted(1, "abc"), step(5000, "z"))


@pytest.mark.parametrize("round", [1, 2, 3])
def test_an_earlier_round_or_the_same_does_not_follow(round: int) -> None:
    with pytest.raises(BadMessage, match="does not follow from round 3"):
        led(trusted(3, "ab"), step(round, "ab"))


def test_the_next_round_must_be_made_from_the_trusted_state() -> None:
    with pytest.raises(BadMessage, match="does not follow from round 1"):
        led(trusted(1, "ab"), link(2, digest(9), digest(2), "ab"))


def _set(field: str, to: object) -> Callable[[Link], None]:
    return lambda it: setattr(it, field, to)


def _members(it: Link) -> None:
    it.members[:] = ["a", "b"]


def _ballot(it: Link) -> None:
    it.ballot.number += 1


def _leader(it: Link) -> None:
    it.ballot.leader = "b"


def _one_less(it: Link) -> None:
    del it.votes[2]


def _twice(it: Link) -> None:
    it.votes.add().CopyFrom(it.votes[2])


def _out_of_order(it: Link) -> None:
    it.votes[0].CopyFrom(it.votes[1])


LINK_CHANGES: dict[str, Callable[[Link], None]] = {
    "round": _set("round", 4),
    "digest": _set("digest", digest(9)),
    "base": _set("base", digest(9)),
    "members": _members,
    "ballot": _ballot,
    "leader": _leader,
    "a vote less": _one_less,
    "a vote twice": _twice,
    "another's vote": _out_of_order,
}


@pytest.mark.parametrize("change", LINK_CHANGES)
def test_a_link_of_which_one_field_was_changed_is_refused(change: str) -> None:
    it = step(3, "abc")
    LINK_CHANGES[change](it)
    with pytest.raises(BadMessage):
        led(trusted(1, "abc"), it)
    assert led(trusted(1, "abc"), step(3, "abc")) == trusted(3, "abc")


VOTE_CHANGES: dict[str, object] = {"node": "z", "round": 4, "digest": digest(9), "plan": digest(9)}


@pytest.mark.parametrize("signed_again", [False, True], ids=["changed by others", "signed by its node"])
@pytest.mark.parametrize("change", [*VOTE_CHANGES, "ballot", "prior"])
def test_a_vote_of_which_one_field_was_changed_is_refused(change: str, signed_again: bool) -> None:
    it = step(3, "ab")
    vote = Vote.FromString(it.votes[1].statement)
    if change in VOTE_CHANGES:
        setattr(vote, change, VOTE_CHANGES[change])
    elif change == "ballot":
        vote.ballot.number += 1
    else:
        vote.prior.CopyFrom(ballot(1, "a"))
    if not signed_again:
        it.votes[1].statement = vote.SerializeToString(deterministic=True)
    elif change == "prior":
        return  # what it voted for before is its own to say
    else:
        it.votes[1].CopyFrom(PlainStatements("b").seal(vote))
    with pytest.raises(BadMessage):
        led(trusted(1, "abc"), it)


def test_a_plan_names_all_that_votes_must_agree_on() -> None:
    plans = [
        plan_name(digest(1), ballot(1, "a"), "ab", "ab"),
        plan_name(digest(2), ballot(1, "a"), "ab", "ab"),
        plan_name(digest(1), ballot(2, "a"), "ab", "ab"),
        plan_name(digest(1), ballot(1, "b"), "ab", "ab"),
        plan_name(digest(1), ballot(1, "a"), "abc", "ab"),
        plan_name(digest(1), ballot(1, "a"), "ab", "abc"),
        plan_name(digest(1), ballot(1, "a"), "a", "bab"),
    ]
    assert len(set(plans)) == len(plans)


def test_a_plan_is_named_as_it_always_was() -> None:
    """Golden: proofs on the disks of a run are read by later versions."""
    name = plan_name(digest(1), ballot(1, "a" * 16), ["a" * 16, "b" * 16], ["a" * 16])
    assert name.hex() == "cd0e7ac4fa36ae8985120ba2f92c833b1810778af3e14bf6f24a9cf41583f49c"


# --- what is kept of a chain --------------------------------------------------------------------------


def test_a_newcomer_needs_the_links_where_members_change_and_the_last_two() -> None:
    chain = [step(1, "a"), *(step(at, "ab") for at in (2, 3, 4)), *(step(at, "abc") for at in (5, 6, 7))]
    needed = [chain[at] for at in essential([it.members for it in chain])]
    assert [it.round for it in needed] == [1, 2, 5, 6, 7]
    assert led(Trusted(-1, b"", ("a",)), link(0, b"", digest(0), "a"), *needed) == trusted(7, "abc")


@pytest.mark.parametrize(("known", "members"), [(1, "a"), (2, "ab"), (3, "ab"), (4, "ab"), (6, "abc")])
def test_links_that_are_needed_lead_on_from_wherever_somebody_stands(known: int, members: str) -> None:
    rest = [step(at, "ab" if at < 5 else "abc") for at in range(known + 1, 8)]
    needed = [rest[at] for at in essential([it.members for it in rest])]
    assert led(trusted(known, members), *needed) == trusted(7, "abc")


def test_a_fingerprint_names_round_digest_and_members() -> None:
    it = trusted(12, "ab")
    others = [trusted(13, "ab"), Trusted(12, digest(9), ("a", "b")), trusted(12, "a")]
    assert it.fingerprint.startswith("12-")
    assert it.fingerprint not in [other.fingerprint for other in others]
