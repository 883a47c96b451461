"""A chunk's data is written and read without protobuf, and is protobuf all the same."""

from __future__ import annotations

import numpy as np
import pytest

from pier_node.wire.bounds import parse_chunk
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage, Chunk
from pier_proto.v1 import peer_pb2 as pb

BALLOT = pb.Ballot(number=3, leader="a" * 16)
OPENING = Chunk(round=7, ballot=BALLOT, stage=Chunk.STAGE_SCATTER, offset=12)


def chunk(size: int) -> Chunk:
    return Chunk(7, BALLOT, Chunk.STAGE_SCATTER, 12, bytes(range(256)) * (size // 256) + bytes(size % 256), b"m" * 32)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1 << 14, CHUNK_BYTES - 1, CHUNK_BYTES])
def test_what_is_written_is_read_here_and_by_protobuf(size: int) -> None:
    sent = chunk(size)
    raw = sent.encoded()
    assert parse_chunk(raw) == sent
    assert pb.Chunk.FromString(raw).data == sent.data
    assert parse_chunk(pb.Chunk.FromString(raw).SerializeToString()) == sent  # protobuf writes the data elsewhere


def test_values_are_a_view_of_what_arrived_and_aligned() -> None:
    values = np.arange(1000, dtype=np.float32)
    opened = parse_chunk(Chunk(stage=Chunk.STAGE_STATE, data=values.data.cast("B")).encoded())
    arrived = np.frombuffer(opened.data, np.float32)
    assert isinstance(opened.data, memoryview)
    assert arrived.flags.aligned
    assert np.array_equal(arrived, values)


@pytest.mark.parametrize("end", [1, 3, 4, 5, 100, 1000])
def test_what_was_cut_off_is_refused(end: int) -> None:
    with pytest.raises(BadMessage):
        parse_chunk(chunk(1020).encoded()[:end])


def test_data_that_is_too_long_or_there_twice_is_refused() -> None:
    with pytest.raises(BadMessage, match="is there twice"):
        parse_chunk(chunk(8).encoded() + pb.Chunk(data=b"1234").SerializeToString())
    size = CHUNK_BYTES + 4
    head = bytes((0x2A, size & 127 | 128, size >> 7 & 127 | 128, size >> 14))
    with pytest.raises(BadMessage, match=f"{size} bytes"):
        parse_chunk(head + bytes(size) + OPENING.encoded())
    with pytest.raises(ValueError, match="bytes in a chunk"):
        chunk(size).encoded()


@pytest.mark.parametrize("at", [slice(0, 1), slice(1, 3), slice(-3, None)])
def test_noise_is_refused_or_within_bounds(at: slice) -> None:
    for noise in range(256):
        raw = bytearray(chunk(40).encoded())
        raw[at] = bytes([noise]) * len(raw[at])
        try:
            assert len(parse_chunk(bytes(raw)).data) < len(raw)
        except BadMessage:
            continue
