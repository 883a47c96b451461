"""The carrier interface: everything above it (rounds, quorum, state transfer) is written against this interface.

A carrier knows peers by node id. It delivers whole, validated messages, in order within a stream, and raises `PeerLost`
for anything that keeps a peer from answering. It neither retries nor interprets.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from pier_proto.v1.peer_pb2 import (
    AbortNotice,
    Ack,
    Chunk,
    Dropped,
    FetchRequest,
    HelloReply,
    HelloRequest,
    IterationPlan,
    LeaveRequest,
    Manifest,
    MeetReply,
    MeetRequest,
    ProbeReply,
    ProbeRequest,
    Proposal,
    Pulse,
    SettleReply,
    SettleRequest,
    Signed,
    StateRequest,
    Total,
    Worked,
)

PROTOCOL = 4
CHUNK_BYTES = 1 << 20

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
    """One question and its answer."""

    name: str
    request: type[Q]
    reply: type[R]


HELLO = Method("Hello", HelloRequest, HelloReply)
BEAT = Method("Beat", Pulse, Pulse)
LEAVE = Method("Leave", LeaveRequest, Ack)
GATHER = Method("Gather", Signed, Proposal)
VOTE = Method("CastVote", Signed, Ack)
ABORT = Method("Abort", AbortNotice, Ack)
MEET = Method("Meet", MeetRequest, MeetReply)
SETTLE = Method("Settle", SettleRequest, SettleReply)
ROUTE = Method("Route", IterationPlan, Ack)
TALLY = Method("Tally", Worked, Total)
DROP = Method("Drop", Dropped, Ack)
DESCRIBE = Method("Describe", StateRequest, Manifest)
PROBE = Method("Probe", ProbeRequest, ProbeReply)

Handler = Callable[[str, Q], Awaitable[R]]
"""Answers a question; its first argument is the authenticated node id of the asker."""


class Carrier(Protocol):
    """One site's end of the wire."""

    node: str

    def introduce(self, node: str, address: str) -> None:
        """Remember (or change) the address of a peer."""

    def forget(self, node: str) -> None:
        """Close the connections to a peer that will not be asked again."""

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        """Say hello to the node that listens at an address. Raises PeerLost."""

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        """Ask a peer. Raises PeerLost if no answer comes within `timeout` seconds, PeerRefused if the peer says no."""

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        """Stream chunks to a peer (Exchange) with back-pressure; return once it took them all. Raises PeerLost."""

    def pull(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream a piece of a peer's state (Fetch). The iterator raises PeerLost."""

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer a method. The handler raises BadMessage to refuse."""

    def serve_push(self, handler: Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]) -> None:
        """Receive the streams that peers push."""

    def serve_pull(self, handler: Callable[[str, FetchRequest], AsyncIterator[Chunk]]) -> None:
        """Serve the streams that peers pull."""

    def bytes_sent(self) -> int:
        """Payload bytes that this site has sent so far, over all streams."""
