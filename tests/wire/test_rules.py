from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from pier_node.wire.carrier import BadMessage
from pier_node.wire.rules import Many, Only, Part, Rule, Rules, Table, complete, increasing
from pier_proto.v1.peer_pb2 import AbortNotice, Ballot, LeaveRequest, Manifest, MeetReply, SettleRequest, Value

SHORT = Only("at most 3 letters", lambda value: len(value) <= 3)
SMALL = Only("below 10", lambda value: value < 10)


def rules(**fields: Rule) -> Rules:
    kinds: list[type[Message]] = [LeaveRequest, Value, Manifest]
    of_kind: dict[type[Message], dict[str, Rule]] = dict.fromkeys(kinds, fields)
    return Rules({**of_kind, Ballot: {"number": SMALL}}, {Ballot: _odd})


def _odd(ballot: Ballot) -> str:
    return "has an odd number" if ballot.number % 2 else ""


def refusal(given_rules: Rules, message: Message) -> str:
    with pytest.raises(BadMessage) as error:
        given_rules.check(message)
    return str(error.value)


def test_a_value_is_checked_and_named() -> None:
    rules(node=SHORT).check(LeaveRequest(node="abc"))
    assert (
        refusal(rules(node=SHORT), LeaveRequest(node="abcd")) == "LeaveRequest.node = 'abcd': must be at most 3 letters"
    )


def test_long_and_strange_values_are_shown_short_and_plain() -> None:
    text = refusal(rules(node=SHORT), LeaveRequest(node="\x1b" * 1000))
    assert text == "LeaveRequest.node = '" + r"\x1b" * 19 + "...: must be at most 3 letters"
    assert refusal(rules(digest=SHORT), Value(digest=bytes(70))) == "Value.digest = 70 bytes: must be at most 3 letters"


def test_parts_may_be_needed() -> None:
    rules(origin=Part()).check(Value())
    assert refusal(rules(origin=Part(needed=True)), Value()) == "Value.origin is missing"


def test_parts_are_checked_as_what_they_are() -> None:
    rules(origin=Part()).check(Value(origin=Ballot(number=8)))
    assert (
        refusal(rules(origin=Part()), Value(origin=Ballot(number=12))) == "Value.origin.number = 12: must be below 10"
    )
    assert refusal(rules(origin=Part()), Value(origin=Ballot(number=3))) == "Value.origin has an odd number"


def test_lists_are_bounded_before_their_items_are_looked_at() -> None:
    many = rules(members=Many(SHORT, 2))
    many.check(Value(members=["b", "a"]))
    assert refusal(many, Value(members=["abcd"] * 3)) == "Value.members has 3 items: must have at most 2"
    assert refusal(many, Value(members=["abc", "abcd"])).startswith("Value.members[1] = 'abcd'")


@pytest.mark.parametrize("members", [["b", "a"], ["a", "a"]])
def test_lists_may_have_to_be_in_order(members: list[str]) -> None:
    assert refusal(rules(members=Many(SHORT, 9, ordered=True)), Value(members=members)).endswith("in order, each once")


def test_maps_are_checked_on_both_sides() -> None:
    table = rules(ledger=Table(SHORT, SMALL, 2))
    table.check(Manifest(ledger={"a": 9, "b": 0}))
    assert refusal(table, Manifest(ledger={"abcd": 1})).startswith("Manifest.ledger[0] = 'abcd'")
    assert refusal(table, Manifest(ledger={"a": 10})).startswith("Manifest.ledger[0] = 10")
    assert refusal(table, Manifest(ledger={"a": 1, "b": 1, "c": 1})).startswith("Manifest.ledger has 3 items")


@given(st.lists(st.integers(0, 5), max_size=5))
def test_increasing_is_sorted_without_repeats(values: list[int]) -> None:
    assert increasing(values) == (values == sorted(set(values)))


def test_booleans_enumerations_and_parts_need_no_rule_of_their_own() -> None:
    fields = complete({MeetReply: {"other": SHORT}})[MeetReply]
    assert [*fields] == ["verdict", "partner", "other"]
    all_rules = Rules({MeetReply: fields}, {})
    all_rules.check(MeetReply(verdict=MeetReply.VERDICT_OVER))
    assert refusal(all_rules, MeetReply(verdict=99)) == (  # type: ignore[arg-type]
        "MeetReply.verdict = 99: must be one that this version knows"
    )
    given = {"round": SMALL, "meeting": SHORT, "digest": SHORT, "at": SMALL}
    Rules(complete({SettleRequest: given}), {}).check(SettleRequest(yes=True))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"node": SHORT, "round": SMALL, "suspect": SHORT}, "AbortNotice.reason has no rule"),
        ({"node": SHORT, "round": SMALL, "suspect": SHORT, "reason": SHORT, "why": SHORT}, "AbortNotice has no why"),
    ],
)
def test_every_other_field_needs_a_rule_and_every_rule_a_field(given: dict[str, Rule], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        complete({AbortNotice: given})


def test_lists_need_a_rule() -> None:
    with pytest.raises(ValueError, match=r"LeaveRequest\.handovers has no rule"):
        complete({LeaveRequest: {"node": SHORT, "asks": SHORT}})
