"""Sending a stream to a member of an attempt: whatever goes wrong becomes a suspicion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pier.v1.peer_pb2 import Chunk
from pier_node.outer.suspicion import NOBODY, Suspicion
from pier_node.wire.carrier import Carrier, PeerLost, PeerRefused


async def send(carrier: Carrier, node: str, chunks: AsyncGenerator[Chunk]) -> None:
    """Send all of it; the stream is closed in any case. Raises Suspicion: of nobody if the member refused it."""
    async with aclosing(chunks):
        try:
            await carrier.push(node, chunks)
        except PeerRefused as refused:
            raise Suspicion(NOBODY, f"{node} refused what we sent: {refused.reason}") from refused
        except PeerLost as lost:
            raise Suspicion(node, lost.reason) from lost
