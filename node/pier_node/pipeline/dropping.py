"""Tells sites of a plan that its attempt is over. Who does not hear of it finds out by waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from pier.v1.peer_pb2 import Dropped
from pier_node.wire.carrier import DROP, Carrier, PeerLost

log = logging.getLogger(__name__)


async def drop(
    carrier: Carrier, nodes: Iterable[str], attempt: bytes, suspect: str, reason: str, patience: float
) -> None:
    """Tell these nodes, each within `patience` seconds."""
    notice = Dropped(attempt=attempt, suspect=suspect, reason=reason[:1000])

    async def tell(node: str) -> None:
        try:
            await carrier.call(node, DROP, notice, patience)
        except PeerLost as lost:
            log.info("could not tell %s that the attempt is over: %s", lost.node, lost.reason)

    await asyncio.gather(*(tell(node) for node in nodes))
