from __future__ import annotations

from pier_node.gossip.pair_commit import KEPT, Doubt, Records


def doubt(number: int, decider: str = "a") -> Doubt:
    return Doubt(number, decider, bytes([number % 256]) * 32, b"d" * 32)


def test_a_vote_is_a_doubt_until_the_step_is_taken() -> None:
    records = Records().voted(doubt(3)).voted(doubt(4, "b"))
    assert set(records.doubts) == {3, 4}
    taken = records.took(4, "b")
    assert (taken.partners, set(taken.doubts)) == ({4: "b"}, {3})
    assert records.doubts.keys() == {3, 4}, "records never change"


def test_a_doubt_may_come_to_nothing() -> None:
    records = Records({2: "c"}).voted(doubt(3)).learned(3)
    assert records == Records({2: "c"})
    assert records.learned(9) == records


def test_a_second_meeting_in_a_round_takes_the_place_of_the_first() -> None:
    assert Records().voted(doubt(3)).voted(doubt(3, "b")).doubts[3].decider == "b"


def test_only_the_newest_are_kept() -> None:
    records = Records()
    for number in range(1, 2 * KEPT + 1):
        records = records.took(number, "a").voted(doubt(1000 + number))
    assert list(records.partners) == [*range(KEPT + 1, 2 * KEPT + 1)]
    assert list(records.doubts) == [*range(1000 + KEPT + 1, 1000 + 2 * KEPT + 1)]
