"""What a carrier does: everything above it (rounds, quorum, state transfer) is written against this interface.

A carrier knows peers by node id. It delivers whole, validated messages, in order within a stream, and raises `PeerLost`
for anything that keeps a peer from answering. It neither retries nor interprets.

Bulk data travels in chunks: a small header, and data that is copied once on its way out and never on its way in. On the
wire a chunk is the message Chunk of peer.proto. protobuf itself would copy the data into a message, out of it, and once
more at each look. So the data is written by hand, as the first field, and read as a view of what arrived. Its key and
its length take four bytes, whatever the length, so that the values are aligned in memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import Message

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


PROTOCOL = 6
MESSAGE_BYTES = CHUNK_BYTES + (64 << 10)
"""Largest message in bytes: a chunk with the fields that name it."""
REPLY_BYTES = 2 << 20
"""Largest answer in bytes except those below: a Hello with a roster of 1024 sites and the run's configuration."""
MANIFEST_BYTES = 16 << 20
"""Largest answer to Describe, in bytes."""
PROPOSAL_BYTES = 32 << 20
"""Largest answer to Gather, in bytes: 1024 announcements, each of which names 1024 sites that it has voted with."""
TOKENIZER_BYTES = 64 << 20
"""Largest tokenizer.json that is sent, in bytes: those of vocabularies of 262,144 tokens have half of it."""

GREETING = 10.0
"""Seconds for the answer to a hello."""
KEEPALIVE = 20.0
"""Seconds between pings on an idle connection, and for the answer to each."""

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class PeerLost(Exception):
    """A peer did not answer: it is gone, unreachable, too slow, or was cut off in mid-stream."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node = node
        self.reason = reason


class PeerRefused(PeerLost):
    """A peer answered that it refuses; `reason` is its own explanation."""


class BadMessage(Exception):
    """A peer sent a message that is out of bounds, malformed or inconsistent: it is refused, and the peer told so."""


@dataclass(frozen=True)
class Method(Generic[Q, R]):
    """One question and its answer, of at most `most` bytes."""

    name: str
    request: type[Q]
    reply: type[R]
    most: int = REPLY_BYTES


HELLO = Method("Hello", pb.HelloRequest, pb.HelloReply)
BEAT = Method("Beat", pb.Pulse, pb.Pulse)
LEAVE = Method("Leave", pb.LeaveRequest, pb.Ack)
GATHER = Method("Gather", pb.Signed, pb.Proposal, PROPOSAL_BYTES)
VOTE = Method("CastVote", pb.Signed, pb.Ack)
ABORT = Method("Abort", pb.AbortNotice, pb.Ack)
MEET = Method("Meet", pb.MeetRequest, pb.MeetReply)
SETTLE = Method("Settle", pb.SettleRequest, pb.SettleReply)
ROUTE = Method("Route", pb.IterationPlan, pb.Ack)
TALLY = Method("Tally", pb.Worked, pb.Total)
DROP = Method("Drop", pb.Dropped, pb.Ack)
DESCRIBE = Method("Describe", pb.StateRequest, pb.Manifest, MANIFEST_BYTES)
TOKENIZER_PART = Method("Tokenizer", pb.TokenizerRequest, pb.TokenizerPart)
PROBE = Method("Probe", pb.ProbeRequest, pb.ProbeReply)
EXCHANGE, FETCH = "Exchange", "Fetch"
"""The two kinds of streams: pushed to a peer, and pulled from it."""

Handler = Callable[[str, Q], Awaitable[R]]
"""Answers a question; its first argument is the authenticated node id of the asker."""


class Carrier(Protocol):
    """One site's end of the wire."""

    node: str

    def introduce(self, node: str, address: str) -> None:
        """Remember (or change) the address of a peer."""

    def forget(self, node: str) -> None:
        """Close the connections to a peer that will not be asked again."""

    async def greet(self, address: str, request: pb.HelloRequest, timeout: float) -> pb.HelloReply:
        """Say hello to the node that listens at an address. Raises PeerLost."""

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        """Ask a peer. Raises PeerLost if no answer comes within `timeout` seconds, PeerRefused if the peer says no."""

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        """Stream chunks to a peer (Exchange) with back-pressure; return once it took them all. Raises PeerLost."""

    def pull(self, peer: str, request: pb.FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream a piece of a peer's state (Fetch). The iterator raises PeerLost."""

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer a method. The handler raises BadMessage to refuse."""

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        """Receive the streams that peers push."""

    def serve_pull(self, handler: Callable[[str, pb.FetchRequest], AsyncIterator[Chunk]]) -> None:
        """Serve the streams that peers pull."""

    def bytes_sent(self) -> int:
        """Payload bytes that this site has sent so far, over all streams."""
