"""What both carriers share: the calls that a node answers, a link to each peer, and what goes with every call.

A carrier has a Link to each peer that it asks, and a server for its network. Answers holds the handlers, and does for
both servers what does not depend on the network: it checks what arrives, counts what is sent, and limits the calls of a
peer, so that none takes all of this node's capacity.

Call metadata travels with every call: who calls, in which run, and the proof of who answers. TLS alone shows that both
ends hold the run's token; their keys show which of its holders they are. The caller's key is in its certificate. The
node that answers signs the caller's nonce and id, for two reasons: a certificate's name is worth nothing where
everybody can issue certificates, and the caller's library does not show it the other end's key. Without TLS the names
are taken as given: --insecure is for networks where everyone is trusted.

`keep_chunk_memory` keeps freed chunks in the process. glibc returns a freed block of CHUNK_BYTES to the kernel, and a
chunk takes several such blocks on its way; faulting that memory in again costs half as much processor time on top. See
mallopt(3). A C library without mallopt needs nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.certificates import node_id_of_certificate
from pier_node.identity.node import ALGORITHM, node_id
from pier_node.wire.addresses import Choice
from pier_node.wire.bounds import parse, parse_chunk
from pier_node.wire.carrier import (
    CHUNK_BYTES,
    EXCHANGE,
    FETCH,
    HELLO,
    PROTOCOL,
    BadMessage,
    Chunk,
    Handler,
    Method,
    PeerLost,
    Q,
    R,
)
from pier_node.wire.rules import NODE_ID
from pier_proto.v1.peer_pb2 import FetchRequest, HelloReply, HelloRequest, ProbeRequest

Headers = Mapping[str, str | bytes]

PROTOCOL_KEY, RUN, FROM, TO = "pier-protocol", "pier-run", "pier-node", "pier-to"
NONCE, PROOF = "pier-nonce-bin", "pier-proof-bin"

_POINT_BYTES = 65
"""Length in bytes of a P-256 public key as an uncompressed point (SEC 1)."""


class NotAdmitted(Exception):
    """A call that is refused before its message is read; the text goes back to the caller."""


@dataclass(frozen=True)
class CallMetadata:
    """A node's own metadata.

    Attributes:
        run_hash: hash of the run's configuration; empty while it is not known, when only Hello can be asked.
        key: signs this node's answers; None without TLS.
        put_out: nodes that have a certificate but no longer belong to the run, and why, in words.
    """

    node: str
    run_hash: bytes
    key: ec.EllipticCurvePrivateKey | None = None
    put_out: dict[str, str] = field(default_factory=dict)

    def call(self, to: str | None) -> dict[str, str | bytes]:
        """Headers of a call to a node; None calls whichever node listens there."""
        headers: dict[str, str | bytes] = {
            PROTOCOL_KEY: str(PROTOCOL),
            RUN: self.run_hash.hex(),
            FROM: self.node,
            NONCE: secrets.token_bytes(16),
        }
        return {**headers, TO: to} if to else headers

    def admit(self, method: str, headers: Headers, certificate: bytes | None) -> str:
        """The node id of a caller, from its certificate under TLS. Raises NotAdmitted."""
        if (spoken := headers.get(PROTOCOL_KEY)) != str(PROTOCOL):
            theirs = ascii(spoken) if spoken else "none"
            raise NotAdmitted(f"this node speaks protocol {PROTOCOL}, the caller {theirs}: install one version of Pier")
        caller = self._caller(headers, certificate)
        if caller in self.put_out:
            raise NotAdmitted(f"node {caller} {self.put_out[caller]}")
        if (to := headers.get(TO, self.node)) != self.node:
            raise NotAdmitted(f"node {self.node} answers here, not {to!a}: two sites advertise one address")
        run = headers.get(RUN, "")
        if run != self.run_hash.hex() and not (method == HELLO.name and run == ""):
            raise NotAdmitted(f"this is run {self.run_hash.hex()[:8]}, the caller is in run {ascii(run)[1:9]}")
        return caller

    def answer(self, caller: str, headers: Headers) -> dict[str, str | bytes]:
        """Headers of the answer to an admitted call."""
        nonce = headers.get(NONCE)
        if self.key is None or not isinstance(nonce, bytes):
            return {FROM: self.node}
        point = self.key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        return {FROM: self.node, PROOF: point + self.key.sign(_signed(caller, nonce), ALGORITHM)}

    def answered(self, asked: Headers, answer: Headers) -> str:
        """The node id of the node that answered our call. Raises ValueError if the answer does not prove it."""
        if self.key is None:
            return str(answer.get(FROM, ""))
        proof, nonce = answer.get(PROOF, b""), asked[NONCE]
        assert isinstance(proof, bytes)
        assert isinstance(nonce, bytes)
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), proof[:_POINT_BYTES])
        try:
            key.verify(proof[_POINT_BYTES:], _signed(self.node, nonce), ALGORITHM)
        except InvalidSignature as error:
            raise ValueError("the signature is wrong") from error
        if (node := node_id(key)) in self.put_out:
            raise ValueError(f"node {node} {self.put_out[node]}")
        return node

    def _caller(self, headers: Headers, certificate: bytes | None) -> str:
        claimed = headers.get(FROM, "")
        if self.key is None:
            if not isinstance(claimed, str) or not NODE_ID.fullmatch(claimed):
                raise NotAdmitted(f"{FROM} must be the caller's node id")
            return claimed
        if certificate is None:
            raise NotAdmitted("the call came without a certificate")
        try:
            proven = node_id_of_certificate(certificate)
        except ValueError as error:
            raise NotAdmitted(str(error)) from error
        if claimed != proven:
            raise NotAdmitted(f"the caller says it is {claimed!a}, its certificate is of {proven}")
        return proven


def _signed(caller: str, nonce: bytes) -> bytes:
    """The bytes whose signature proves who answers. TLS proved the caller's id in them: no third node can reuse it."""
    return b"pier answer\0" + caller.encode() + nonce


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_chunk_memory() -> None:
    """Keep up to 32 chunks of freed memory in this process, and allocate blocks below 4 chunks on its heap."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_THRESHOLD, 4 * CHUNK_BYTES)
        library.mallopt(_TRIM_THRESHOLD, 32 * CHUNK_BYTES)


CALLS = 4096
CALLS_PER_PEER = 64
PATIENCE = 10.0
"""Seconds that a caller gets to end a refused stream."""
TAKEN = 60.0
"""Seconds in which a caller must take each part of a stream that it pulls: until then, what it pulls is in memory."""
GRACE = 0.5
"""Seconds that calls in progress get to end by themselves when the node stops or their caller is gone."""

Push = Callable[[str, AsyncIterator[Chunk]], Awaitable[None]]
Pull = Callable[[str, FetchRequest], AsyncIterator[Chunk]]


class Busy(Exception):
    """A peer has as many calls in progress as a peer may have."""


async def taken(part: Awaitable[None]) -> None:
    """Send a part of a pulled stream. Raises BadMessage: the caller does not take it."""
    try:
        async with asyncio.timeout(TAKEN):
            await part
    except TimeoutError as error:
        raise BadMessage(f"nothing of the stream was taken for {TAKEN:.0f} s") from error


class Answers:
    """The calls that a node answers. Its server says who the caller is.

    Attributes:
        sent: payload bytes sent, by peer.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()
        self._handlers: dict[str, tuple[Method[Any, Any], Handler[Any, Any]]] = {}
        self._push: Push = _not_yet
        self._pull: Pull | None = None

    def serve(self, method: Method[Q, R], handler: Handler[Q, R]) -> None:
        """Answer a method. The handler raises BadMessage to refuse, and is cancelled when the caller goes away."""
        self._handlers[method.name] = method, handler

    def serve_push(self, handler: Push) -> None:
        """Receive the streams that peers push; one that is cut off raises PeerLost in the handler."""
        self._push = handler

    def serve_pull(self, handler: Pull) -> None:
        """Serve the streams that peers pull. A handler whose caller is gone is cancelled."""
        self._pull = handler

    def knows(self, name: str) -> bool:
        """Whether a method or stream of this name is answered."""
        return name in self._handlers or name == EXCHANGE or (name == FETCH and self._pull is not None)

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """Hold a place for one call of a peer. Raises Busy."""
        if self._under_way[caller] >= CALLS_PER_PEER:
            raise Busy(f"{CALLS_PER_PEER} calls of {caller} are under way already")
        self._under_way[caller] += 1
        try:
            yield
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]

    async def answer(self, name: str, caller: str, raw: bytes, seen_as: str) -> bytes:
        """The answer to a request of a method that is known. Raises BadMessage.

        Args:
            seen_as: HOST:PORT that the caller is connected from; "" if it is not known.
        """
        method, handler = self._handlers[name]
        request = parse(method.request, raw)
        if isinstance(request, ProbeRequest):
            request.seen_as = seen_as
        reply = await handler(caller, request)
        if isinstance(reply, HelloReply):
            reply.seen_as = seen_as
        answer: bytes = reply.SerializeToString()
        return answer

    async def take(self, caller: str, messages: AsyncIterator[bytes]) -> None:
        """Receive a pushed stream to its end. Raises BadMessage, and what `messages` raises."""
        chunks = (parse_chunk(raw) async for raw in messages)
        await self._push(caller, chunks)
        async for _ in chunks:
            raise BadMessage("more chunks than were expected")

    async def give(self, caller: str, raw: bytes) -> AsyncGenerator[bytes]:
        """The messages of a pulled stream. Raises BadMessage."""
        assert self._pull
        chunks = self._pull(caller, parse(FetchRequest, raw))
        try:
            async for chunk in chunks:
                yield chunk.encoded()
                self.sent[caller] += len(chunk.data)
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()


async def _not_yet(_caller: str, _chunks: AsyncIterator[Chunk]) -> None:
    raise BadMessage("no streams are taken here yet")


class Link(Protocol):
    """The way to one peer."""

    address: str

    async def ask(self, method: Method[Q, R], request: Q, timeout: float) -> tuple[str, R]:
        """The node that answered, and its answer. Raises PeerLost."""

    async def push(self, chunks: AsyncIterator[Chunk], count: Callable[[int], None]) -> None:
        """Stream chunks, and `count` their payload bytes. Raises PeerLost."""

    def pull(self, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream what the peer sends. Raises PeerLost."""

    async def close(self) -> None:
        """Close the link; all calls in progress raise PeerLost."""


class SiteCarrier(Answers, ABC):
    """A Carrier that a site starts and stops: a link to each peer that it asks, and a server for what it answers.

    Both show this node's `metadata`.
    """

    def __init__(self, metadata: CallMetadata) -> None:
        super().__init__()
        self.node, self._metadata = metadata.node, metadata
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False

    @abstractmethod
    def connect(self, node: str | None, address: str) -> Link:
        """A link to a node at an address; None as the node means whichever node listens there."""

    @abstractmethod
    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others: see `choose_address`. Raises PierError."""

    @abstractmethod
    async def stop_answering(self) -> None:
        """Stop listening, and end all calls that are being answered."""

    async def stop(self) -> None:
        """Close all connections and stop listening within two seconds; all calls in progress fail."""
        self._stopped = True
        await asyncio.gather(self.stop_answering(), *(link.close() for link in self._links.values()), *self._closing)

    def introduce(self, node: str, address: str) -> None:
        """Remember (or change) the address of a peer."""
        known = self._links.get(node)
        if known is not None and known.address == address:
            return
        self._links[node] = self.connect(node, address)
        if known is not None:
            self._close(known)

    def forget(self, node: str) -> None:
        """Close the link to a peer that will not be asked again."""
        if link := self._links.pop(node, None):
            self._close(link)

    def refuse(self, nodes: Iterable[str], why: str) -> None:
        """Refuse all contact with these nodes from now on and tell them why; their calls in progress fail."""
        self._metadata.put_out.update(dict.fromkeys(nodes, why))
        for node in self._metadata.put_out.keys() & self._links.keys():
            self.forget(node)

    async def greet(self, address: str, request: HelloRequest, timeout: float) -> HelloReply:
        """Say hello to the node that listens at an address. Raises PeerLost."""
        link = self.connect(None, address)
        try:
            node, reply = await link.ask(HELLO, request, timeout)
        finally:
            await link.close()
        if reply.site.node != node:
            raise PeerLost(address, f"{address}: node {node} calls itself {reply.site.node}")
        return reply

    async def call(self, peer: str, method: Method[Q, R], request: Q, timeout: float) -> R:
        """Ask a peer. Raises PeerLost if no answer comes within `timeout` seconds, PeerRefused if the peer says no."""
        _, reply = await self._link(peer).ask(method, request, timeout)
        return reply

    async def push(self, peer: str, chunks: AsyncIterator[Chunk]) -> None:
        """Stream chunks to a peer with back-pressure; return once it took them all. Raises PeerLost.

        There is no deadline while the connection is alive; a silent connection is given up after 40 s. The caller sets
        a limit.
        """
        await self._link(peer).push(chunks, partial(self._count, peer))

    async def pull(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream a piece of a peer's state. The iterator raises PeerLost; like `push`, it has no deadline."""
        async with aclosing(self._link(peer).pull(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def bytes_sent(self) -> int:
        """Payload bytes that this site has sent so far, over all streams."""
        return self.sent.total()

    def count_from(self, sent: int) -> None:
        """Count on from what this site had sent before it was started again."""
        self.sent[""] = sent

    def bytes_sent_to(self, peer: str) -> int:
        """Payload bytes sent to one peer so far."""
        return self.sent[peer]

    def _count(self, peer: str, size: int) -> None:
        self.sent[peer] += size

    def _close(self, link: Link) -> None:
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _link(self, peer: str) -> Link:
        if self._stopped:
            raise PeerLost(peer, "this node is stopping")
        if peer not in self._links:
            raise PeerLost(peer, "nobody said yet where it is reached")
        return self._links[peer]
