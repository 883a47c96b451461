"""The answering side of the hivemind carrier: admits peers, checks what they send, and reports what went wrong."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from pier_node.base.address import format_address
from pier_node.base.tasks import first_of
from pier_node.wire.bounds import parse
from pier_node.wire.carrier import EXCHANGE, FETCH, HELLO, KEEPALIVE, MESSAGE_BYTES, BadMessage, PeerLost
from pier_node.wire.grpc.reasons import brief
from pier_node.wire.libp2p.host import Host
from pier_node.wire.libp2p.stream import LINE, NAME_BYTES, OPENING_BYTES, CutOff, Kind, Stream, headers
from pier_node.wire.links import CALLS, CALLS_PER_PEER, GRACE, PATIENCE, Answers, Busy, Headers, NotAdmitted, taken
from pier_proto.v1.stream_pb2 import Opening

STRANGERS = 256
"""Most streams of peers that have no line yet: one each, to open it."""
OPENINGS = 8
"""Most streams of one such peer."""
STREAMS_PER_PEER = 2 * CALLS_PER_PEER
"""Most streams of a peer with a line: its calls and lines, and room to refuse calls beyond CALLS_PER_PEER."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """A peer that has a line to this node, and what it said of itself, which is proved.

    Attributes:
        peer: its libp2p peer id.
        seen_as: HOST:PORT that it is connected from; "" through a relay.
    """

    node: str
    peer: bytes
    said: Headers
    certificate: bytes | None
    seen_as: str


class PeerServer:
    """Serves a node's answers over libp2p."""

    def __init__(self, answers: Answers, host: Host) -> None:
        self._answers, self._host = answers, host
        self._callers: dict[bytes, list[Caller]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._strangers: set[asyncio.Task[Any]] = set()
        self._open: Counter[Any] = Counter()  # streams by peer id

    # --- a stream ------------------------------------------------------------------------------

    async def handle(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by p2pd for each stream that a peer opens; never raises."""
        stream, peer, places, most, each = Stream(reader, writer), info.peer_id, self._strangers, STRANGERS, OPENINGS
        if peer.to_bytes() in self._callers:
            places, most, each = self._tasks, CALLS, STREAMS_PER_PEER
        if len(places) < most and self._open[peer] < each:
            task = asyncio.create_task(self._answer(info, stream))
            places.add(task)
            self._open[peer] += 1
            await asyncio.wait({task})
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
            self._strangers.discard(task)
            self._tasks.discard(task)
        stream.close()

    async def stop(self) -> None:
        """End all calls in progress."""
        work = self._tasks | self._strangers
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work, timeout=GRACE)

    async def _answer(self, info: Any, stream: Stream) -> None:
        method = ""
        try:
            method = (await _message(stream, NAME_BYTES, PATIENCE)).decode(errors="replace")
            if method == LINE:
                await self._hold_line(await self._meet(info, stream), stream)
            else:
                await self._serve(method, self._known(info.peer_id, method), stream)
        except CutOff:
            return  # the caller is gone
        except Exception as error:
            if not isinstance(error, (*_REFUSALS, PeerLost)):
                log.exception("%s, asked by libp2p peer %s, failed", ascii(method)[1:-1], info.peer_id)
            with suppress(CutOff, TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await stream.send(*_told(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await stream.gone()  # the asker closes the stream; otherwise the last frame might not arrive

    async def _serve(self, method: str, caller: Caller, stream: Stream) -> None:
        """Answer a call. Its handler is cancelled when the caller goes away; a pushed stream says so itself."""
        if not self._answers.knows(method):
            raise BadMessage("it does not answer that, or not yet")
        with self._answers.place(caller.node):
            if method == EXCHANGE:
                await self._answers.take(caller.node, _messages(caller.node, stream))
                await stream.send(Kind.END)
                return
            raw = await _message(stream, MESSAGE_BYTES)
            if method == FETCH:
                await first_of(self._give(caller.node, raw, stream), _until_gone(stream))
                await stream.send(Kind.END)
                return
            answer = self._answers.answer(method, caller.node, raw, caller.seen_as)
            await stream.send(Kind.MESSAGE, await first_of(answer, _until_gone(stream)))

    async def _give(self, caller: str, raw: bytes, stream: Stream) -> None:
        async with aclosing(self._answers.give(caller, raw)) as messages:
            async for message in messages:
                await taken(stream.send(Kind.MESSAGE, message))

    # --- who is there --------------------------------------------------------------------------

    async def _meet(self, info: Any, stream: Stream) -> Caller:
        """The node that a peer opening a line proves to be. Raises NotAdmitted."""
        opened, peer = parse(Opening, await _message(stream, OPENING_BYTES, PATIENCE)), info.peer_id.to_bytes()
        said, certificate = headers(opened), opened.identity_proof.certificate or None
        try:
            self._host.bearer(opened.identity_proof, peer)
        except ValueError as error:
            raise NotAdmitted(f"the caller is not let in: {error}") from error
        node = self._host.metadata.admit(HELLO.name, said, certificate)
        return Caller(node, peer, said, certificate, _seen_as(info.addr))

    def _known(self, peer: Any, method: str) -> Caller:
        """The node that a peer with a line has proved to be. Raises NotAdmitted, PeerLost."""
        lines = self._callers.get(peer.to_bytes())
        if not lines:
            raise PeerLost(str(peer), "it asks before it has said who it is")
        self._host.metadata.admit(method, lines[-1].said, lines[-1].certificate)
        return lines[-1]

    async def _hold_line(self, caller: Caller, stream: Stream) -> None:
        self._callers.setdefault(caller.peer, []).append(caller)
        if (task := asyncio.current_task()) in self._strangers:  # it is none any more, for as long as the line lasts
            self._strangers.discard(task)
            self._tasks.add(task)
        try:
            await stream.send(Kind.MESSAGE, self._host.identity_proof.SerializeToString())
            async with asyncio.timeout(None) as patience:
                while True:
                    patience.reschedule(asyncio.get_running_loop().time() + 3 * KEEPALIVE)
                    await stream.receive(0)
                    await stream.send(Kind.PING)
        except TimeoutError as error:
            raise CutOff from error
        finally:
            self._callers[caller.peer].remove(caller)
            if not self._callers[caller.peer]:
                del self._callers[caller.peer]


async def _message(stream: Stream, most: int, seconds: float = 2 * KEEPALIVE) -> bytes:
    """The message that must come next. Raises BadMessage, CutOff."""
    try:
        async with asyncio.timeout(seconds):
            kind, body = await stream.receive(most)
    except TimeoutError as error:
        raise BadMessage(f"nothing came within {seconds:.0f} s") from error
    if kind is not Kind.MESSAGE:
        raise BadMessage(f"a frame of kind {kind.name} where a message belongs")
    return body


async def _messages(sender: str, stream: Stream) -> AsyncGenerator[bytes]:
    while True:
        try:
            kind, body = await stream.receive(MESSAGE_BYTES)
        except CutOff as error:
            raise PeerLost(sender, "its stream was cut off") from error
        if kind is Kind.END:
            return
        if kind is not Kind.MESSAGE:
            raise BadMessage(f"a frame of kind {kind.name} where a chunk belongs")
        yield body


async def _until_gone(stream: Stream) -> NoReturn:
    await stream.gone()
    raise CutOff


def _told(error: Exception) -> tuple[Kind, bytes]:
    known = isinstance(error, (*_REFUSALS, PeerLost))
    reason = str(error) if known else f"it failed to answer, see its log: {type(error).__name__}"
    return Kind.REFUSED if isinstance(error, _REFUSALS) else Kind.FAILED, brief(reason).encode()


_REFUSALS = (NotAdmitted, BadMessage, Busy)


def _seen_as(address: Any) -> str:
    """HOST:PORT of the other end of a connection, from its multiaddr; "" through a relay."""
    if "p2p-circuit" in address or "tcp" not in address:
        return ""
    return format_address(address["ip6" if "ip6" in address else "ip4"], int(address["tcp"]))
