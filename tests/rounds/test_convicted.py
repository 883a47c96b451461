"""Who is proved to have voted twice is put out, at once and after a restart; and nobody else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from rounds.cases import ballot, link
from simulation.statements import MemoryProofs, PlainStatements

from pier_node.rounds.double_votes import CONVICTED_FILE, Convicted
from pier_node.wire.bounds import RULES
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import DoubleVote, Vote

A, B = "a" * 16, "b" * 16


def double(node: str, other: bytes = b"2" * 32) -> DoubleVote:
    votes = [Vote(node=node, round=5, ballot=ballot(1, A), digest=it, plan=bytes(32)) for it in (b"1" * 32, other)]
    one, two = map(PlainStatements(node).seal, votes)
    return DoubleVote(one=one, other=two)


class Here:
    """A site that knows of rounds with the member `A`."""

    def __init__(self, folder: Path) -> None:
        self.barred: list[str] = []
        proofs = MemoryProofs()
        proofs.add([link(1, b"", bytes(32), [A])])  # type: ignore[arg-type]
        self.convicted = Convicted(folder, PlainStatements(B), proofs, lambda nodes, _: self.barred.extend(nodes))
        self.convicted.restore()


def test_a_member_that_voted_twice_is_put_out_and_stays_so(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.convicted.take([double(A), double(A)])
    assert here.barred == [A]
    assert [it.one.node for it in here.convicted.proven] == [A]
    again = Here(tmp_path)
    assert again.barred == [A]
    assert again.convicted.proven == here.convicted.proven


def test_who_never_was_a_member_takes_no_room(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.convicted.take([double(B)])
    assert (here.barred, here.convicted.proven) == ([], [])


def test_votes_that_prove_nothing_are_refused(tmp_path: Path) -> None:
    here = Here(tmp_path)
    with pytest.raises(BadMessage, match="do not contradict each other"):
        here.convicted.take([double(A, b"1" * 32)])
    assert here.barred == []


def test_a_damaged_file_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Here(tmp_path).convicted.take([double(A)])
    path = tmp_path / CONVICTED_FILE
    path.write_bytes(path.read_bytes()[:-20])
    assert Here(tmp_path).barred == []
    assert "the peers will tell who voted twice" in caplog.text


def test_a_proof_is_within_the_bounds_of_a_message() -> None:
    RULES.check(double(A))
    with pytest.raises(BadMessage):
        RULES.check(DoubleVote(one=double(A).one))
