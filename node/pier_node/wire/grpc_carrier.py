"""The gRPC carrier: direct connections between sites, mutual TLS, fast. See carrier.py for what a carrier does."""

from __future__ import annotations

from collections.abc import Sequence

from pier_node.certificates import Credentials
from pier_node.wire.address import format_address, parse_address
from pier_node.wire.allocator import keep_chunk_memory
from pier_node.wire.card import Card
from pier_node.wire.grpc_client import Link
from pier_node.wire.grpc_server import PeerServer
from pier_node.wire.interfaces import Choice, choose_address
from pier_node.wire.linked_carrier import LinkedCarrier, Tally
from pier_node.wire.multiaddr import first_hop


class GrpcCarrier(LinkedCarrier):
    """A Carrier over gRPC.

    Args:
        node: this node's id.
        run_hash: hash of the run's configuration; b"" as long as it is not known: only `greet` works then.
        credentials: what proves that this node is in the run; None: neither encrypted nor authenticated.
    """

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None) -> None:
        card = Card(node, run_hash, credentials.key if credentials else None)
        sent = Tally()
        self._server = PeerServer(card, credentials, sent.add)
        super().__init__(card, lambda peer, address: Link(card, credentials, peer, address), self._server, sent)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses if `port` is 0. Raises PierError."""
        keep_chunk_memory()
        return await self._server.start(host, port)

    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others; see interfaces.py. Raises PierError."""
        host, port = parse_address(at)
        port = await self.start(host, port)
        return choose_address([first_hop(peer) for peer in peers], advertise, format_address(host, port))
