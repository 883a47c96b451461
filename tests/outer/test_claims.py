from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.v1.peer_pb2 import Pulse, Site
from pier_node.outer.claims import is_credible
from pier_node.outer.quorum import has_quorum

NODES = "abcde"
TRUE, OTHER = b"t" * 32, b"o" * 32


def pulse(node: str, round: int = 5, pledge: bytes | None = b"", digest: bytes = b"") -> Pulse:
    return Pulse(site=Site(node=node), round=round, digest=digest, pledge=pledge)


def claim(round: int = 6, digest: bytes = TRUE) -> Pulse:
    return pulse("z", round, digest=digest)


@pytest.mark.parametrize(
    ("said", "credible"),
    [
        ([pulse("a"), pulse("b")], False),
        ([pulse("a"), pulse("b", pledge=OTHER)], False),
        ([pulse("a"), pulse("b", pledge=TRUE)], True),
        ([pulse("a"), pulse("b", round=6)], True),
        ([pulse("a"), pulse("b", round=4)], True),
        ([pulse("a"), pulse("b", pledge=None)], True),
        ([pulse("a")], True),
        ([pulse("a"), pulse("x"), pulse("y")], True),
    ],
    ids=[
        "none voted",
        "for others",
        "one did",
        "one is there",
        "one is behind",
        "one says nothing",
        "dead",
        "strangers",
    ],
)
def test_a_claim_is_doubted_while_too_few_can_have_voted(said: list[Pulse], credible: bool) -> None:
    assert is_credible(claim(), 5, "abc", [*said, claim()]) is credible


def test_a_vote_for_another_result_does_not_speak_against_a_round_after_that() -> None:
    said = [pulse("a", pledge=OTHER), pulse("b", pledge=OTHER)]
    assert not is_credible(claim(6), 5, "abc", said)
    assert is_credible(claim(7), 5, "abc", said)


def test_without_a_last_round_everybody_is_believed() -> None:
    assert is_credible(claim(), 5, "", [pulse("a"), claim()])


@given(st.sets(st.sampled_from(NODES), min_size=1), st.sets(st.sampled_from(NODES)))
def test_what_was_decided_is_believed_whoever_has_not_heard_of_it(base: set[str], voters: set[str]) -> None:
    if has_quorum(voters, base):
        said = [pulse(node, pledge=TRUE if node in voters else b"") for node in NODES]
        assert is_credible(claim(), 5, base, said)
        assert is_credible(claim(9), 5, base, said)
