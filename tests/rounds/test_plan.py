from __future__ import annotations

import pytest
from rounds.cases import ballot

from pier_node.rounds.plan import Plan
from pier_node.wire.chunk import Chunk
from pier_proto.v1.peer_pb2 import Share

SHARES = [
    Share(node="a", tokens=10, norm=2.0, offset=0, length=5),
    Share(node="b", tokens=0, norm=0.0, offset=5, length=0),
    Share(node="c", tokens=20, norm=2.0, offset=5, length=4),
    Share(node="d", tokens=5, norm=60.0, offset=9, length=1),
]
PLAN = Plan(7, ballot(3), SHARES, norm_limit=50.0, silence=1.0, chunk=2)


def test_a_shard_is_cut_into_chunks() -> None:
    assert PLAN.ranges(SHARES[0]) == [(0, 2), (2, 4), (4, 5)]
    assert PLAN.ranges(SHARES[1]) == []


def test_a_chunk_names_its_attempt() -> None:
    chunk = PLAN.message(Chunk.STAGE_GATHER, 5, b"data")
    assert (chunk.round, chunk.ballot, chunk.stage, chunk.offset, chunk.data) == (7, ballot(3), 2, 5, b"data")


def test_whoever_has_no_tokens_gives_nothing() -> None:
    assert [share.node for share in PLAN.givers()] == ["a", "c", "d"]
    assert PLAN.weights() == [0.5, 1.0, 0.25]


def test_what_anyone_may_send() -> None:
    assert PLAN.clips() == {"d": pytest.approx(0.1)}
    assert PLAN.longest(SHARES[0], lossy=False) == pytest.approx(2.02)
    assert PLAN.longest(SHARES[0], lossy=True) == pytest.approx(4.0)
    assert PLAN.longest(SHARES[3], lossy=False) == 50.0
    assert PLAN.longest_mean(lossy=False) == pytest.approx(3 * 2.0 * 2 * 3**0.5 * 1.01), "c has twice the usual tokens"
