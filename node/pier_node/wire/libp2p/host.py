"""This node on libp2p: its p2pd, its own identity, and the check of other identities, for both ends of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pier_node.identity.certificates import Credentials
from pier_node.wire.libp2p.dial import NoWay, dial, of_p2pd
from pier_node.wire.libp2p.discovery import Discovery, bearer, issue
from pier_node.wire.libp2p.p2pd import P2pd
from pier_node.wire.libp2p.relay import ASKING, listening, relays_enough
from pier_node.wire.libp2p.stream import Kind, Stream
from pier_node.wire.metadata import CallMetadata
from pier_node.wire.multiaddr import Route
from pier_proto.v1.stream_pb2 import IdentityProof

if TYPE_CHECKING:
    from hivemind.p2p import P2P

STREAM_PROTOCOL = "/pier/1.0.0"
"""The libp2p protocol name of our streams."""


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

    async def start(self, key: Path | None, host: str, port: int) -> P2P:
        """Start a p2pd that listens. Raises PierError."""

        async def relays(p2p: P2P) -> bool:
            here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            return here == host == "127.0.0.1" or await relays_enough(Route(here, port, str(p2p.peer_id)))

        async def arrive(p2p: P2P) -> None:
            await self.discovery.join(p2p)
            await self._arrive(p2p)

        return await self._start(P2pd(key, listening(host, port), arrive, relays))

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
        from hivemind.p2p import PeerID

        try:
            await dial(await self.client(), routes)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise NoWay("p2pd has just ended here: it is being started again") from error
        return bytes(PeerID.from_base58(routes[0].peer).to_bytes())

    async def stream(self, peer: bytes, name: str) -> Stream:
        """Open a stream to a connected peer, and name its purpose. Raises NoWay, CutOff; there is no deadline."""
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        p2p = await self.client()
        try:
            _, reader, writer = await p2p.call_binary_stream_handler(PeerID(peer), STREAM_PROTOCOL)
        except P2PDaemonError as error:
            raise NoWay(of_p2pd(str(error))) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise NoWay("p2pd has just ended here: it is being started again") from error
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
