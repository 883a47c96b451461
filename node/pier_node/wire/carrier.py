"""The carrier interface: everything above it (rounds, quorum, state transfer) is written against this interface.

A carrier knows peers by node id. It delivers whole, validated messages, in order within a stream, and raises `PeerLost`
for anything that keeps a peer from answering. It neither retries nor interprets.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from pier_node.wire.addresses import Choice
from pier_node.wire.chunk import CHUNK_BYTES, Chunk
from pier_proto.v1 import peer_pb2 as pb

PROTOCOL = 4
MESSAGE_BYTES = CHUNK_BYTES + (64 << 10)
"""Largest message in bytes: a chunk with the fields that name it."""
REPLY_BYTES = 2 << 20
"""Largest answer in bytes except Describe's: a Hello with a roster of 1024 sites and the run's configuration."""
MANIFEST_BYTES = 16 << 20
"""Largest answer to Describe, in bytes."""

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
GATHER = Method("Gather", pb.Signed, pb.Proposal)
VOTE = Method("CastVote", pb.Signed, pb.Ack)
ABORT = Method("Abort", pb.AbortNotice, pb.Ack)
MEET = Method("Meet", pb.MeetRequest, pb.MeetReply)
SETTLE = Method("Settle", pb.SettleRequest, pb.SettleReply)
ROUTE = Method("Route", pb.IterationPlan, pb.Ack)
TALLY = Method("Tally", pb.Worked, pb.Total)
DROP = Method("Drop", pb.Dropped, pb.Ack)
DESCRIBE = Method("Describe", pb.StateRequest, pb.Manifest, MANIFEST_BYTES)
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


class SiteCarrier(Carrier, Protocol):
    """A carrier that a site starts and stops."""

    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others. Raises PierError.

        Args:
            advertise: HOST or HOST:PORT that the user wants; None to choose one.
            peers: addresses of sites to join; may be empty.
        """

    def refuse(self, nodes: Iterable[str], why: str) -> None:
        """Refuse all contact with these nodes from now on and tell them why; their calls in progress fail."""

    def bytes_sent_to(self, peer: str) -> int:
        """Payload bytes sent to one peer so far."""

    async def stop(self) -> None:
        """Close all connections and stop listening within two seconds; all calls in progress fail."""
