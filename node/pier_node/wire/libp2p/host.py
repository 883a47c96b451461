"""This node on libp2p: its p2pd, its identity proof, and how it reaches its peers.

libp2p proves that the other end of a connection holds the key of its peer id, and nothing else. An identity proof binds
that peer id to a node: it is the node's certificate, which only a holder of the run's token can issue, and a signature
of the peer id by the certificate's key. It is worthless to anyone but that peer, so it may be shown to everyone.

After a failed connection p2pd does not try that address again for five seconds, later for minutes. A site that comes
back must be found at once, so `dial` first tries with its own connection whether anything listens there. It translates
the kernel's errors and p2pd's messages into words for people.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from pier_node.base.tasks import cancel_and_wait
from pier_node.identity.certificates import Credentials, certified_key, node_id_of_certificate
from pier_node.identity.node import ALGORITHM
from pier_node.wire.addresses import Route
from pier_node.wire.grpc.reasons import brief
from pier_node.wire.libp2p.discovery import Discovery
from pier_node.wire.libp2p.p2pd import ASKING, P2pd, listening
from pier_node.wire.libp2p.stream import Kind, Stream
from pier_node.wire.links import CallMetadata
from pier_proto.v1.stream_pb2 import IdentityProof

STREAM_PROTOCOL = "/pier/1.0.0"
"""The libp2p protocol name of our streams."""


def issue(node: str, credentials: Credentials | None, peer: bytes) -> IdentityProof:
    """A node's identity proof for its libp2p peer id; without credentials it holds only a name."""
    if credentials is None:
        return IdentityProof(node=node)
    proof = credentials.key.sign(_signed(peer), ALGORITHM)
    return IdentityProof(node=node, certificate=credentials.cert_pem, proof=proof)


@lru_cache(maxsize=2048)
def bearer(ca: bytes, certificate: bytes, proof: bytes, peer: bytes) -> str:
    """The node id of a libp2p peer that shows this proof.

    Args:
        ca: certificate of the run's authority (PEM).

    Raises:
        ValueError: the proof belongs to another run, node or peer, is forged, or is not valid now.
    """
    node = node_id_of_certificate(certificate)
    try:
        certified_key(ca, certificate).verify(proof, _signed(peer), ALGORITHM)
    except InvalidSignature as error:
        raise ValueError("its identity_proof is of another libp2p peer") from error
    return node


def _signed(peer: bytes) -> bytes:
    return b"pier identity_proof\0" + peer


_SIGNS = (
    ("peer id mismatch", "another node answers there"),
    ("NO_RESERVATION", "the relay has no way to it: that site is down, or just starting"),
    ("RESOURCE_LIMIT_EXCEEDED", "the relay has as many connections as it may have"),
    ("protocols not supported", "whoever answers there is no Pier node, or is just starting"),
    ("failed to negotiate", "whoever answers there does not speak libp2p, or is in another version of it"),
    ("dial backoff", "no connection: tried a moment ago, and not again for some seconds"),
    ("i/o timeout", "no connection: it is down, or behind a firewall"),
    ("deadline exceeded", "no connection: it is down, or behind a firewall"),
)
_ERRORS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there",
    errno.EHOSTUNREACH: "no route to that host",
    errno.ENETUNREACH: "no route to that host",
    errno.ETIMEDOUT: "no connection: it is down, or behind a firewall",
}


def of_error(error: OSError) -> str:
    """Why a TCP connection could not be made."""
    if isinstance(error, socket.gaierror):
        return "no such host" if error.errno == socket.EAI_NONAME else "the host's name cannot be looked up"
    return _ERRORS.get(error.errno or 0, f"no connection: {error.strerror or error}")


def of_p2pd(text: str) -> str:
    """Why p2pd does not reach a peer, from its message."""
    for sign, words in _SIGNS:
        if sign in text:
            return words
    return f"no connection: {brief(text.removeprefix('Connect failed. msg='))}"


_P2P, _CIRCUIT = b"\xa5\x03", b"\xa2\x02"
"""Codes of /p2p and /p2p-circuit as varints (https://github.com/multiformats/multiaddr/blob/master/protocols.csv)."""
DIRECT_SECONDS = 1.0
"""Seconds for which a direct connection is preferred to one through a relay that is there first."""


class NoWay(Exception):
    """A peer cannot be reached; the text says why, with the first route's reason first."""


@contextmanager
def reaching() -> Iterator[None]:
    """Raise what goes wrong at p2pd, or on the way to it, as NoWay."""
    try:
        yield
    except P2PDaemonError as error:
        raise NoWay(of_p2pd(str(error))) from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise NoWay("p2pd has just ended here: it is being started again") from error


async def dial(p2p: P2P, routes: Sequence[Route]) -> None:
    """Return once p2pd has a connection to a peer. Raises NoWay; there is no deadline."""
    peer = PeerID.from_base58(routes[0].peer)
    with reaching():
        if peer in {known.peer_id for known in await p2p.list_peers()}:
            return
        ways = await _ways([route for route in routes if route.relay != str(p2p.peer_id)])
        await p2p._client.connect(peer, ways)  # P2P itself connects only to the peers it was started with


async def _ways(routes: Sequence[Route]) -> list[object]:
    """The open routes in p2pd's form: all that open within a second of the first. Raises NoWay."""
    if not routes:
        raise NoWay("it is reached only through this node, and has not come yet")
    trying = {asyncio.create_task(_open(route)): route for route in routes}
    try:
        waiting, found = set(trying), set[asyncio.Task[tuple[str, int] | str]]()
        while waiting and not found:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            found |= {task for task in done if isinstance(task.result(), tuple)}
        if waiting:
            await asyncio.wait(waiting, timeout=DIRECT_SECONDS)
    finally:
        await cancel_and_wait(*trying)
    results = [(route, task.result()) for task, route in trying.items() if not task.cancelled()]
    ways = [_encoded(route, way) for route, way in results if isinstance(way, tuple)]
    if not ways:
        raise NoWay(str(results[0][1]))
    return ways


async def _open(route: Route) -> tuple[str, int] | str:
    """The IP address and port behind a route, or why nothing answers there."""
    try:
        _, writer = await asyncio.open_connection(route.host, route.port)
    except OSError as error:
        return of_error(error)
    host, port = writer.get_extra_info("peername")[:2]
    writer.close()
    return host, port


def _encoded(route: Route, way: tuple[str, int]) -> object:
    """A route in binary form, without the peer at its end. hivemind's encoding of /p2p differs from p2pd's."""
    host, port = way
    first = Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
    if not route.relay:
        return first
    relay = PeerID.from_base58(route.relay).to_bytes()
    return Multiaddr(first.to_bytes() + _P2P + bytes([len(relay)]) + relay + _CIRCUIT)


class Host:
    """This node's call metadata, its part of the DHT, and its p2pd, which listens after `start`, or only asks.

    Args:
        credentials: this node's credentials; None takes names as given.
        ready: called with the client of each p2pd that comes up.
    """

    def __init__(
        self, metadata: CallMetadata, credentials: Credentials | None, ready: Callable[[P2P], Awaitable[None]]
    ) -> None:
        self.metadata = metadata
        self.identity_proof = IdentityProof(node=metadata.node)
        self.discovery = Discovery(metadata.node, metadata.run_hash, credentials)
        self._credentials, self._ready = credentials, ready
        self._p2pd: P2pd | None = None
        self._starting = asyncio.Lock()

    async def start(self, key: Path | None, host: str, port: int, sound: Callable[[P2P], Awaitable[bool]]) -> P2P:
        """Start a p2pd that listens; `key` and `sound` are as of P2pd. Raises PierError."""

        async def arrive(p2p: P2P) -> None:
            await self.discovery.join(p2p)
            await self._arrive(p2p)

        return await self._start(P2pd(key, listening(host, port), arrive, sound))

    async def stop(self) -> None:
        """End p2pd."""
        async with self._starting:
            if self._p2pd is not None:
                await self._p2pd.stop()
        await self.discovery.stop()

    def bearer(self, identity_proof: IdentityProof, peer: bytes) -> str:
        """The node that a peer proves to be. Raises ValueError."""
        if self._credentials is None:
            return identity_proof.node
        if not identity_proof.certificate:
            raise ValueError("it shows no certificate: it was started with --insecure")
        return bearer(self._credentials.ca_pem, identity_proof.certificate, identity_proof.proof, peer)

    async def connect(self, routes: Sequence[Route]) -> bytes:
        """Connect to a peer and return its id. Raises NoWay; there is no deadline."""
        with reaching():
            await dial(await self.client(), routes)
        return bytes(PeerID.from_base58(routes[0].peer).to_bytes())

    async def stream(self, peer: bytes, name: str) -> Stream:
        """Open a stream to a connected peer, and name its purpose. Raises NoWay, CutOff; there is no deadline."""
        p2p = await self.client()
        with reaching():
            _, reader, writer = await p2p.call_binary_stream_handler(PeerID(peer), STREAM_PROTOCOL)
        stream = Stream(reader, writer)
        await stream.send(Kind.MESSAGE, name.encode())
        return stream

    async def client(self) -> P2P:
        """hivemind's client of the running p2pd; if none runs, this starts one that only asks."""
        if self._p2pd is None:
            await self._start(P2pd(None, ASKING, self._arrive))
        assert self._p2pd
        return await self._p2pd.client()

    async def _start(self, p2pd: P2pd) -> P2P:
        async with self._starting:
            if self._p2pd is not None:
                await self._p2pd.stop()
            self._p2pd = p2pd
            return await p2pd.start()

    async def _arrive(self, p2p: P2P) -> None:
        self.identity_proof = issue(self.metadata.node, self._credentials, p2p.peer_id.to_bytes())
        await self._ready(p2p)
