"""A chunk of a bulk stream: a small header, and data that is copied once on its way out and never on its way in.

On the wire it is the message Chunk of peer.proto. protobuf itself would copy the data into a message, out of it, and
once more at each look. So the data is written by hand, as the first field, and read as a view of what arrived. Its key
and its length take four bytes, whatever the length, so that the values are aligned in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from pier_node.base.shared import Buffer
from pier_proto.v1 import peer_pb2 as pb

Stage: TypeAlias = "pb.Chunk.Stage.ValueType"

CHUNK_BYTES = 1 << 20
"""Most bytes of data in a chunk."""

_DATA_KEY = pb.Chunk.DATA_FIELD_NUMBER << 3 | 2
_START = 4


@dataclass(slots=True)
class Chunk:
    """A chunk; the attributes are those of the message in peer.proto.

    Attributes:
        data: valid until the memory that it is a view of changes; a carrier copies it before it waits for anything.
    """

    STAGE_SCATTER: ClassVar = pb.Chunk.STAGE_SCATTER
    STAGE_GATHER: ClassVar = pb.Chunk.STAGE_GATHER
    STAGE_STATE: ClassVar = pb.Chunk.STAGE_STATE
    STAGE_SWAP: ClassVar = pb.Chunk.STAGE_SWAP
    STAGE_ANCHOR: ClassVar = pb.Chunk.STAGE_ANCHOR
    STAGE_ACTIVATION: ClassVar = pb.Chunk.STAGE_ACTIVATION

    round: int = 0
    ballot: pb.Ballot = field(default_factory=pb.Ballot)
    stage: Stage = pb.Chunk.STAGE_UNSPECIFIED
    offset: int = 0
    data: Buffer = b""
    meeting: bytes = b""
    activation: pb.Activation = field(default_factory=pb.Activation)

    @classmethod
    def of(cls, it: pb.Chunk, data: Buffer) -> Chunk:
        """The chunk with this header and this data."""
        return cls(it.round, it.ballot, it.stage, it.offset, data, it.meeting, it.activation)

    def encoded(self) -> bytes:
        """The chunk as it travels."""
        header = pb.Chunk(
            round=self.round,
            ballot=self.ballot,
            stage=self.stage,
            offset=self.offset,
            meeting=self.meeting,
            activation=self.activation if self.activation.attempt else None,
        ).SerializeToString()
        return b"".join((_start(len(self.data)), self.data, header)) if self.data else header


def _start(size: int) -> bytes:
    """The key of the data and its length, a varint that is padded to three bytes."""
    if size > CHUNK_BYTES:
        raise ValueError(f"{size} bytes in a chunk")
    return bytes((_DATA_KEY, size & 127 | 128, size >> 7 & 127 | 128, size >> 14))


def split(raw: bytes) -> tuple[bytes, Buffer]:
    """The header, a message without data, and the data. What `encoded` did not write is all header, data included."""
    if len(raw) >= _START and raw[0] == _DATA_KEY and raw[1] & raw[2] & 128 and not raw[3] & 128:
        end = _START + (raw[1] & 127 | (raw[2] & 127) << 7 | raw[3] << 14)
        if end <= len(raw):
            return raw[end:], memoryview(raw)[_START:end]
    return raw, b""
