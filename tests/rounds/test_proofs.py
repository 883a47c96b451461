"""The links that a site keeps: after a restart, a crash in the middle of a write, damage, and by the thousand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from rounds.cases import ballot, link, outer_state
from simulation.statements import PlainStatements

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.rounds import proofs
from pier_node.rounds.proofs import EARLIER_FILE, PROOFS_FILE, Proofs, Trusted, alone, essential, follow, plan_name
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Handover, Link, Signed, Vote


def step(round: int, members: str) -> Link:
    return link(round, bytes([round]) * 32, bytes([round + 1]) * 32, members)


LINKS = [step(round, "abcd"[:round]) for round in (1, 2, 3, 4)]


def test_what_was_added_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "data" / PROOFS_FILE
    kept = Proofs(path)
    assert kept.after(-1) == []
    kept.add(LINKS[:2])
    kept.add(LINKS[2:])
    for now in (kept, Proofs(path)):
        assert now.after(-1) == LINKS
        assert now.after(2) == LINKS[2:]
        assert now.of(3) == LINKS[2]
        assert (now.first, now.newest, now.of(5)) == (1, 4, None)


def test_all_links_are_kept_and_newcomers_get_those_they_need(tmp_path: Path) -> None:
    links = [step(round, "ab" if round < 6 else "abc") for round in range(1, 10)]
    kept = Proofs(tmp_path / PROOFS_FILE)
    kept.add(links)
    assert [it.round for it in kept.after(-1)] == [1, 6, 8, 9]
    assert [kept.of(it.round) for it in links] == links


def test_a_later_proof_of_a_round_replaces_the_one_that_is_there(tmp_path: Path) -> None:
    kept, other = Proofs(tmp_path / PROOFS_FILE), step(3, "b")
    kept.add(LINKS)
    kept.add([other])
    for now in (kept, Proofs(tmp_path / PROOFS_FILE)):
        assert now.after(-1) == [*LINKS[:2], other]


@settings(max_examples=40, deadline=None)
@given(cut=some.integers(1, 10_000))
def test_a_crash_in_the_middle_of_a_write_costs_that_write_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("crash") / PROOFS_FILE
    Proofs(path).add(LINKS[:2])
    before = path.stat().st_size
    Proofs(path).add(LINKS[2:3])
    written = path.read_bytes()
    path.write_bytes(written[: before + cut % (len(written) - before)])
    again = Proofs(path)
    assert again.after(-1) == LINKS[:2]
    again.add(LINKS[2:])
    assert Proofs(path).after(-1) == LINKS


def test_damage_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / PROOFS_FILE
    Proofs(path).add(LINKS[:3])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = Proofs(path)
    assert again.after(-1) == LINKS[:1]
    again.add(LINKS[3:])
    assert Proofs(path).after(-1) == [LINKS[0], LINKS[3]]


def test_zeros_that_a_power_cut_left_at_the_end_cost_no_link(tmp_path: Path) -> None:
    path = tmp_path / PROOFS_FILE
    Proofs(path).add(LINKS[:3])
    with path.open("ab") as file:
        file.write(bytes(100))
    again = Proofs(path)
    assert again.after(-1) == LINKS[:3]
    again.add(LINKS[3:])
    assert Proofs(path).after(-1) == LINKS


def test_a_file_that_changes_while_it_is_in_use_is_named(tmp_path: Path) -> None:
    path = tmp_path / PROOFS_FILE
    kept = Proofs(path)
    kept.add(LINKS)
    path.write_bytes(bytes(path.stat().st_size))
    for read in (lambda: kept.of(LINKS[0].round), lambda: kept.after(-1)):
        with pytest.raises(PierError, match=r"proofs\.bin is damaged"):
            read()


def test_the_older_half_of_a_large_file_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = [step(round, "ab") for round in range(1, 41)]
    monkeypatch.setattr(proofs, "LARGE", 30 * links[0].ByteSize())
    kept = Proofs(tmp_path / PROOFS_FILE)
    for it in links:
        kept.add([it])
    assert kept.of(40) == links[-1]
    assert kept.of(1) == links[0]
    assert kept.of(5) is None
    assert (tmp_path / PROOFS_FILE).stat().st_size < proofs.LARGE
    assert Proofs(tmp_path / PROOFS_FILE).after(-1) == kept.after(-1)


def test_links_are_read_while_the_file_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = [step(round, "ab") for round in range(1, 200)]
    monkeypatch.setattr(proofs, "LARGE", 10 * links[0].ByteSize())
    kept = Proofs(tmp_path / PROOFS_FILE)
    kept.add(links[:5])

    def write() -> None:
        for it in links[5:]:
            kept.add([it])

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        while not writing.done():
            assert set(map(_key, kept.after(-1))) <= set(map(_key, links))
            assert kept.of(1) == links[0]
        writing.result()
    assert kept.of(199) == links[-1]


def _key(link: Link) -> bytes:
    return link.SerializeToString()


def test_the_file_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    earlier = tmp_path / EARLIER_FILE
    earlier.write_bytes(durable.seal({"links": [it.SerializeToString().hex() for it in LINKS]}))
    assert Proofs(tmp_path / PROOFS_FILE).after(-1) == LINKS
    assert not earlier.exists()
    assert Proofs(tmp_path / PROOFS_FILE).after(-1) == LINKS


def test_who_needs_more_than_a_page_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Proofs(tmp_path / PROOFS_FILE)
    kept.add(LINKS)
    monkeypatch.setattr(proofs, "PAGE", LINKS[0].ByteSize() + LINKS[1].ByteSize())
    found, round = [], 0
    while page := kept.after(round):
        found.append(len(page))
        round = page[-1].round
    assert (found, round) == ([2, 1, 1], 4)


def test_a_link_larger_than_a_page_is_sent_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Proofs(tmp_path / PROOFS_FILE)
    kept.add(LINKS)
    monkeypatch.setattr(proofs, "PAGE", 1)
    assert kept.after(-1) == LINKS[:1]


def test_what_cannot_be_written_is_an_error_and_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    kept = Proofs(tmp_path / "data" / PROOFS_FILE)
    with pytest.raises(PierError, match=r"cannot write down the proof of a round in .*: File exists"):
        kept.add(LINKS)
    assert kept.after(-1) == []


READER = PlainStatements("reader")


def digest(round: int) -> bytes:
    return round.to_bytes(4, "big") * 8


def proved_step(round: int, members: str, group: str = "", **more: object) -> Link:
    """From the state of the round before to that of `round`."""
    return link(round, digest(round - 1), digest(round), members, group, **more)  # type: ignore[arg-type]


def led(trusted: Trusted, *links: Link) -> Trusted:
    for it in links:
        trusted = follow(trusted, it, READER)
    return trusted


def trusted(round: int, members: str) -> Trusted:
    return Trusted(round, digest(round), tuple(members))


def given_link(giver: str, heir: str, round: int, votes: str = "") -> Signed:
    handover = Handover(node=giver, heir=heir, round=round, base=digest(round), votes=votes or giver, number=1)
    return PlainStatements(giver).seal(handover)


# --- what is believed ------------------------------------------------------------------------------


def test_a_chain_leads_through_members_that_change() -> None:
    """One site begins, others come, the first goes: at each step a majority of those before has voted."""
    chain = [
        proved_step(2, "ab"),
        proved_step(5, "abc"),
        proved_step(6, "bc"),
        proved_step(9, "bcd"),
        proved_step(12, "cd"),
    ]
    assert led(trusted(1, "a"), *chain) == trusted(12, "cd")


def test_rounds_with_the_same_members_are_skipped() -> None:
    assert led(trusted(3, "abc"), proved_step(4000, "abc", "ac")) == trusted(4000, "abc")


def test_a_newcomer_begins_with_the_founder() -> None:
    """It trusts nothing but who began the run."""
    founder, first = Trusted(-1, b"", ("a",)), outer_state("a")
    beginning = alone(first, b"", PlainStatements("a"))
    believed = led(founder, beginning)
    assert believed == Trusted(0, first.digest, ("a",))
    assert led(believed, link(1, first.digest, digest(1), "ab"), proved_step(2, "ab")) == trusted(2, "ab")
    with pytest.raises(BadMessage, match="without a majority"):
        led(Trusted(-1, b"", ("b",)), beginning)


def test_of_an_even_split_the_side_with_the_lowest_id_is_believed() -> None:
    assert led(trusted(1, "abcd"), proved_step(2, "ab")) == trusted(2, "ab")
    with pytest.raises(BadMessage, match="without a majority of the members of round 1"):
        led(trusted(1, "abcd"), proved_step(2, "cd"))


def test_votes_that_were_handed_over_count() -> None:
    handed = proved_step(2, "a", handovers=[given_link("b", "a", 1)])
    assert led(trusted(1, "abc"), handed) == trusted(2, "a")


def test_a_vote_in_limbo_counts_with_giver_and_heir() -> None:
    lost = proved_step(2, "bc", handovers=[given_link("c", "b", 1)])
    assert led(trusted(1, "abc"), lost) == trusted(2, "bc")


# --- what is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handovers",
    [[], [given_link("b", "c", 1)], [given_link("b", "a", 0)], [given_link("c", "a", 1, "b")]],
    ids=["nothing", "to another", "of an earlier round", "by who never had it"],
)
def test_votes_that_nobody_handed_over_do_not(handovers: list[Signed]) -> None:
    with pytest.raises(BadMessage, match="without a majority"):
        led(trusted(1, "abc"), proved_step(2, "a", handovers=handovers))


def test_a_handover_that_was_changed_is_refused() -> None:
    forged = given_link("b", "a", 1)
    forged.statement = Handover(node="b", heir="a", round=1, base=digest(1), votes="bc").SerializeToString()
    with pytest.raises(BadMessage, match="a Handover that b has not signed"):
        led(trusted(1, "abc"), proved_step(2, "a", handovers=[forged]))


@pytest.mark.parametrize("group", ["a", "c", "az", "xyz"])
def test_too_few_of_the_members_before_prove_nothing(group: str) -> None:
    with pytest.raises(BadMessage, match="without a majority"):
        led(trusted(1, "abc"), proved_step(2, group))


def test_an_invented_round_far_ahead_proves_nothing() -> None:
    with pytest.raises(BadMessage, match="a proof of round 5000 without a majority of the members of round 1"):
        led(trusted(1, "abc"), proved_step(5000, "z"))


@pytest.mark.parametrize("round", [1, 2, 3])
def test_an_earlier_round_or_the_same_does_not_follow(round: int) -> None:
    with pytest.raises(BadMessage, match="does not follow from round 3"):
        led(trusted(3, "ab"), proved_step(round, "ab"))


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
    it = proved_step(3, "abc")
    LINK_CHANGES[change](it)
    with pytest.raises(BadMessage):
        led(trusted(1, "abc"), it)
    assert led(trusted(1, "abc"), proved_step(3, "abc")) == trusted(3, "abc")


VOTE_CHANGES: dict[str, object] = {"node": "z", "round": 4, "digest": digest(9), "plan": digest(9)}


@pytest.mark.parametrize("signed_again", [False, True], ids=["changed by others", "signed by its node"])
@pytest.mark.parametrize("change", [*VOTE_CHANGES, "ballot", "prior"])
def test_a_vote_of_which_one_field_was_changed_is_refused(change: str, signed_again: bool) -> None:
    it = proved_step(3, "ab")
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
    chain = [
        proved_step(1, "a"),
        *(proved_step(at, "ab") for at in (2, 3, 4)),
        *(proved_step(at, "abc") for at in (5, 6, 7)),
    ]
    needed = [chain[at] for at in essential([it.members for it in chain])]
    assert [it.round for it in needed] == [1, 2, 5, 6, 7]
    assert led(Trusted(-1, b"", ("a",)), link(0, b"", digest(0), "a"), *needed) == trusted(7, "abc")


@pytest.mark.parametrize(("known", "members"), [(1, "a"), (2, "ab"), (3, "ab"), (4, "ab"), (6, "abc")])
def test_links_that_are_needed_lead_on_from_wherever_somebody_stands(known: int, members: str) -> None:
    rest = [proved_step(at, "ab" if at < 5 else "abc") for at in range(known + 1, 8)]
    needed = [rest[at] for at in essential([it.members for it in rest])]
    assert led(trusted(known, members), *needed) == trusted(7, "abc")


def test_a_fingerprint_names_round_digest_and_members() -> None:
    it = trusted(12, "ab")
    others = [trusted(13, "ab"), Trusted(12, digest(9), ("a", "b")), trusted(12, "a")]
    assert it.fingerprint.startswith("12-")
    assert it.fingerprint not in [other.fingerprint for other in others]
