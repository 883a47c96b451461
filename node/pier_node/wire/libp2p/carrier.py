"""The hivemind carrier: libp2p streams through hivemind's P2P, for sites that cannot open a port. See wire/carrier.py.

Link is the asking side: a line to a peer, a stream for each question, and failures as PeerLost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hivemind.p2p import P2P
from hivemind.utils.logging import use_hivemind_log_handler

from pier_node.base.address import format_address, parse_address
from pier_node.base.tasks import cancel_and_wait, first_of, unwatched
from pier_node.identity.certificates import Credentials
from pier_node.wire.addresses import Choice, Route, choose_address, first_hop, free_port, parse_routes
from pier_node.wire.bounds import parse, parse_chunk
from pier_node.wire.carrier import EXCHANGE, FETCH, MESSAGE_BYTES, BadMessage, Chunk, Method, PeerLost, Q, R
from pier_node.wire.libp2p.host import STREAM_PROTOCOL, Host, NoWay
from pier_node.wire.libp2p.p2pd import KEY_FILE
from pier_node.wire.libp2p.relay import RENEWAL, Places, find_unreached, relays_enough
from pier_node.wire.libp2p.server import PeerServer
from pier_node.wire.libp2p.stream import LINE, OPENING_BYTES, CutOff, Kind, Stream, answer, ending, held, opening
from pier_node.wire.links import CallMetadata, SiteCarrier, keep_chunk_memory
from pier_proto.v1.peer_pb2 import FetchRequest
from pier_proto.v1.stream_pb2 import IdentityProof

CONNECT_SECONDS = 20.0
CLOSED = "this node closed the connection"
CUT_OFF = "the connection was cut off"


class Link:
    """The way to one peer or, with `node` None, to whichever node listens at an address: a line, opened on demand.

    Args:
        address: multiaddrs of the peer; any other text raises PeerLost at the first use.
    """

    def __init__(self, host: Host, node: str | None, address: str) -> None:
        self.node, self.address = node, address
        self._host = host
        self._why = ""
        self._line: asyncio.Task[tuple[str, bytes]] | None = None
        self._streams: set[Stream] = set()
        self._helpers: set[asyncio.Task[None]] = set()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask(self, method: Method[Q, R], request: Q, timeout: float) -> tuple[str, R]:
        """The node that answered, and its answer. Raises PeerLost."""
        node = ""
        try:
            async with asyncio.timeout(timeout):
                node, peer = await self._connected()
                async with self._stream(peer, method.name) as stream:
                    await stream.send(Kind.MESSAGE, request.SerializeToString())
                    return node, parse(method.reply, await answer(stream, self._name, method.most))
        except TimeoutError:
            no_answer = f"no answer within {timeout:.3g} s"
            no_connection = f"no connection within {timeout:.3g} s: it is down, or behind a firewall"
            raise self._lost(no_answer if node else no_connection) from None

    async def push(self, chunks: AsyncIterator[Chunk], count: Callable[[int], None]) -> None:
        """Stream chunks, and `count` their payload bytes; return once the peer took them all. Raises PeerLost."""
        _, peer = await self._connected()
        async with self._stream(peer, EXCHANGE) as stream:
            verdict, whole = unwatched(stream.receive(0)), False
            try:
                with suppress(CutOff):  # the verdict says why
                    async for chunk in chunks:
                        if verdict.done():
                            break
                        await stream.send(Kind.MESSAGE, chunk.encoded())
                        count(len(chunk.data))
                    else:
                        await stream.send(Kind.END)
                        whole = True
                kind, reason = await verdict
            finally:
                await cancel_and_wait(verdict)
            if kind in (Kind.REFUSED, Kind.FAILED):
                raise ending(kind, reason, self._name)
        if not whole:
            raise self._lost("it took only a part of the stream")

    async def pull(self, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """Stream what the peer sends. Raises PeerLost."""
        _, peer = await self._connected()
        async with self._stream(peer, FETCH) as stream:
            await stream.send(Kind.MESSAGE, request.SerializeToString())
            while True:
                kind, body = await stream.receive(MESSAGE_BYTES)
                if kind is Kind.END:
                    return
                if kind is not Kind.MESSAGE:
                    raise ending(kind, body, self._name)
                yield parse_chunk(body)

    async def close(self) -> None:
        """Close the line; all calls in progress raise PeerLost."""
        self._lose(CLOSED)
        if not self._closed.done():
            self._closed.set_result(None)
        await cancel_and_wait(*self._helpers, *([self._line] if self._line else []))

    # --- the line ------------------------------------------------------------------------------

    async def _connected(self) -> tuple[str, bytes]:
        """The node and its peer id, once a line to it is open. Raises PeerLost within CONNECT_SECONDS."""
        if self._closed.done():
            raise self._lost(CLOSED)
        if self._line is None or (self._line.done() and (self._line.cancelled() or self._line.exception())):
            self._line = unwatched(self._opened())
        return await first_of(self._until_closed(), asyncio.shield(self._line))

    async def _until_closed(self) -> NoReturn:
        await asyncio.shield(self._closed)
        raise self._lost(CLOSED)

    async def _opened(self) -> tuple[str, bytes]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                peer = await self._found()
                async with self._translated():
                    stream = await self._host.stream(peer, LINE)
                    try:
                        node = await self._met(stream, peer)
                    except BaseException:
                        stream.close()
                        raise
        except NoWay as error:
            raise self._lost(str(error)) from error
        except ValueError as error:
            raise self._lost(f"this node is on libp2p and knows no way there: {error}") from error
        except TimeoutError:
            raise self._lost("no connection: it is down, or behind a firewall") from None
        self._why = ""
        self._host.discovery.meet(peer)
        holder = asyncio.create_task(self._hold(stream))
        self._helpers.add(holder)
        holder.add_done_callback(self._helpers.discard)
        return node, peer

    async def _found(self) -> bytes:
        """Connect to the peer's last known or newly published address; return its peer id. Raises NoWay."""
        try:
            return await self._host.connect(parse_routes(self.address))
        except NoWay:
            moved = await self._host.discovery.find(self.node) if self.node else ""
            if moved in ("", self.address):
                raise
            return await self._host.connect(parse_routes(moved))

    async def _met(self, stream: Stream, peer: bytes) -> str:
        host = self._host
        await stream.send(Kind.MESSAGE, opening(host.metadata, self.node, host.identity_proof).SerializeToString())
        identity_proof = parse(IdentityProof, await answer(stream, self._name, OPENING_BYTES))
        try:
            node = host.bearer(identity_proof, peer)
        except ValueError as error:
            raise self._lost(f"whoever answers there does not prove who it is: {error}") from error
        if self.node not in (None, node):
            raise self._lost(f"node {node} answers there")
        return node

    async def _hold(self, line: Stream) -> None:
        try:
            self._lose(await held(line))
        finally:
            line.close()

    def _lose(self, why: str) -> None:
        self._why = self._why or why
        if self._line is not None and self._line.done():
            self._line = None
        for stream in self._streams:
            stream.close()

    # --- a stream ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stream(self, peer: bytes, name: str) -> AsyncGenerator[Stream]:
        async with self._translated():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    stream = await self._host.stream(peer, name)
            except TimeoutError:
                raise self._lost("the connection went silent") from None
            self._streams.add(stream)
            try:
                yield stream
            finally:
                self._streams.discard(stream)
                stream.close()

    @asynccontextmanager
    async def _translated(self) -> AsyncGenerator[None]:
        try:
            yield
        except CutOff as error:
            self._lose(CUT_OFF)  # otherwise p2pd would dial in vain, and then not again for seconds
            raise self._lost(self._why) from error
        except NoWay as error:
            raise self._lost(str(error)) from error
        except BadMessage as error:
            raise self._lost(f"its answer is not valid: {error}") from error

    def _lost(self, reason: str) -> PeerLost:
        return PeerLost(self._name, f"{self.address}: {reason}")

    @property
    def _name(self) -> str:
        return self.node or self.address


class HivemindCarrier(SiteCarrier):
    """A Carrier over libp2p. Addresses are multiaddrs (wire/addresses.py); `make_carrier` describes the arguments.

    The folder keeps the libp2p key of a node that listens; without one, a new key is made each time.
    """

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None, folder: Path | None) -> None:
        use_hivemind_log_handler("nowhere")
        logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames this level
        super().__init__(CallMetadata(node, run_hash, credentials.key if credentials else None))
        self._run_hash, self._credentials, self._folder = run_hash, credentials, folder
        self._host = Host(self._metadata, credentials, self._ready)
        self._server = PeerServer(self, self._host)
        self._helpers: list[asyncio.Task[None]] = []

    def connect(self, node: str | None, address: str) -> Link:
        """A link to a node at an address; None as the node means whichever node listens there."""
        return Link(self._host, node, address)

    async def stop_answering(self) -> None:
        """Stop listening, and end all calls that are being answered."""
        await self._server.stop()

    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others; see wire/addresses.py. Raises PierError."""
        keep_chunk_memory()
        host, port = parse_address(at)
        port = free_port(host, port)
        key = self._folder / KEY_FILE if self._folder else None
        p2p = await self._host.start(key, host, port, lambda p2p: relays_enough(p2p, host, port))
        choice = choose_address([first_hop(peer) for peer in peers], advertise, format_address(host, port))
        direct = Route(*parse_address(choice.address), str(p2p.peer_id))
        choice = replace(choice, address=str(direct), why=choice.why.replace(choice.address, str(direct), 1))
        choice = choice if advertise else await self._reached(choice, direct, peers)
        self._host.discovery.publish(choice.address)
        return choice

    async def _reached(self, choice: Choice, direct: Route, peers: Sequence[str]) -> Choice:
        """The same choice, with relays added if a peer says that this site needs them."""
        asker = HivemindCarrier(self.node, self._run_hash, self._credentials, None)
        try:
            reason, relays = await find_unreached(asker, choice.address, peers, self._run_hash)
        finally:
            await asker.stop()
        if not relays:
            return choice
        places = Places(relays)
        await places.take(await self._host.client())
        self._helpers.append(asyncio.create_task(self._keep(places)))
        through = " or ".join(format_address(relay.host, relay.port) for relay in relays)
        why = f"others reach this site through {through}: a site has no way to {reason}"
        return replace(choice, address=",".join(map(str, [direct, *places.routes(direct.peer)])), why=why)

    async def _keep(self, places: Places) -> None:
        while True:
            await asyncio.sleep(RENEWAL)
            await places.take(await self._host.client())

    async def stop(self) -> None:
        """Close all connections and stop listening within two seconds; all calls in progress fail."""
        await cancel_and_wait(*self._helpers)
        await super().stop()
        await self._host.stop()

    async def _ready(self, p2p: P2P) -> None:
        await p2p.add_binary_stream_handler(STREAM_PROTOCOL, self._server.handle)
