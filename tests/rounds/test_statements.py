"""A statement holds for whoever made it, for its run and for its purpose; and never when a byte of it was changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rounds.cases import ballot
from simulation.keys import IDENTITIES, NODES

from pier_node.identity.node import Signer
from pier_node.rounds.statements import SignedStatements
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Handover, Ready, Signed, Vote

RUN, OTHER_RUN = bytes(32), bytes(31) + b"1"
ALICE, BOB = NODES["a1"], NODES["b2"]


def statements(name: str, run: bytes = RUN) -> SignedStatements:
    return SignedStatements(Signer(IDENTITIES[name], run))


READY = Ready(node=ALICE, round=5, nonce=b"n", votes=[ALICE], base=bytes(32))
VOTE = Vote(node=ALICE, round=5, ballot=ballot(1, ALICE), digest=bytes(32), plan=bytes(32))
HANDOVER = Handover(node=ALICE, heir=BOB, round=4, base=bytes(32), votes=[ALICE])


def test_everybody_reads_what_a_node_has_signed() -> None:
    alice, bob = statements("a1"), statements("b2")
    assert bob.read(Ready, alice.seal(READY)) == READY
    assert bob.read(Vote, alice.seal(VOTE)) == VOTE
    assert bob.read(Handover, alice.seal(HANDOVER)) == HANDOVER


def _forged(signed: Signed) -> None:
    signed.statement = Vote(
        node=ALICE, round=6, ballot=VOTE.ballot, digest=bytes(32), plan=bytes(32)
    ).SerializeToString()


def _extended(signed: Signed) -> None:
    signed.statement += Vote(round=6).SerializeToString()


def _signature(signed: Signed) -> None:
    signed.signature = signed.signature[:-1] + bytes([signed.signature[-1] ^ 1])


def _unsigned(signed: Signed) -> None:
    signed.signature = b""


def _other_key(signed: Signed) -> None:
    signed.public = statements("b2").seal(VOTE).public


def _other_node(signed: Signed) -> None:
    signed.node = BOB


@pytest.mark.parametrize("forge", [_forged, _extended, _signature, _unsigned, _other_key, _other_node])
def test_what_was_changed_is_refused(forge: Callable[[Signed], None]) -> None:
    signed = statements("a1").seal(VOTE)
    forge(signed)
    with pytest.raises(BadMessage, match="has not signed for this run"):
        statements("b2").read(Vote, signed)


def test_what_was_signed_for_another_run_is_refused() -> None:
    with pytest.raises(BadMessage, match="has not signed for this run"):
        statements("b2").read(Vote, statements("a1", OTHER_RUN).seal(VOTE))


def test_what_was_signed_for_another_purpose_is_refused() -> None:
    """A handover and a vote of the same bytes must not stand for each other."""
    with pytest.raises(BadMessage, match=f"a Handover that {ALICE} has not signed"):
        statements("b2").read(Handover, statements("a1").seal(READY))
    with pytest.raises(BadMessage, match=f"a Ready that {ALICE} has not signed"):
        statements("b2").read(Ready, statements("a1").seal(VOTE))


def test_nobody_speaks_in_anothers_name() -> None:
    """Its own signature is good, but what it says is said by somebody else."""
    with pytest.raises(BadMessage, match=f"a Vote of {BOB} in the name of {ALICE}"):
        statements("a1").read(Vote, statements("b2").seal(VOTE))


def test_what_is_out_of_bounds_is_refused_although_it_is_signed() -> None:
    with pytest.raises(BadMessage, match=r"Vote\.digest"):
        statements("b2").read(Vote, statements("a1").seal(Vote(node=ALICE, ballot=VOTE.ballot)))
