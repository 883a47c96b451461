"""Whether others reach a site that has just begun to listen, and through whom if not.

libp2p's own test of that (AutoNAT) knows public addresses only. Here sites of the run are asked to call back, as for
`pier-node doctor`, by a libp2p peer of its own: they must not be connected to the one that they shall reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pier.v1.peer_pb2 import HelloReply, HelloRequest, ProbeReply, ProbeRequest, Site
from pier_node.wire.carrier import PROBE, PROTOCOL, Carrier, PeerLost
from pier_node.wire.multiaddr import ROUTES, Route, are_routes, parse_routes

ASKED = 4
"""Sites that are asked."""
ANSWER = 12.0
"""Seconds for an answer: more than a call back that fails."""


@dataclass(frozen=True)
class Unreached:
    """What a site that does not reach this one says, and the sites that could relay for it."""

    reason: str
    relays: list[Route]


async def find_unreached(asker: Carrier, address: str, peers: Sequence[str], run_hash: bytes) -> Unreached | None:
    """Ask sites of the run to call an address of this node; None: all who answer reach it.

    Args:
        asker: does not listen, and has this node's id.
    """
    answers = await asyncio.gather(*(_called_back(asker, address, peer, run_hash) for peer in peers[:ASKED]))
    told = [answer for answer in answers if answer is not None]
    tried = [reply for reply, _ in told if not reply.declined]
    # Nobody tries an address from which no call comes, such as one of the network behind a router.
    reasons = [reply.detail or "no connection" for reply in tried or [reply for reply, _ in told] if not reply.reached]
    if not reasons:
        return None
    direct: dict[str, Route] = {}
    for _, hello in told:
        for site in [hello.site, *hello.roster]:
            routes = parse_routes(site.address) if are_routes(site.address) and site.node != asker.node else []
            direct |= {route.peer: route for route in routes if len(routes) == 1}  # those with more have no open port
    return Unreached(reasons[0], list(direct.values())[: ROUTES - 1])


async def _called_back(
    asker: Carrier, address: str, peer: str, run_hash: bytes
) -> tuple[ProbeReply, HelloReply] | None:
    """Whether a site reaches the address, and what it knows; None: it cannot be asked."""
    try:
        hello = await asker.greet(peer, _hello(asker, run_hash), ANSWER)
        asker.introduce(hello.site.node, peer)
        reply = await asker.call(hello.site.node, PROBE, ProbeRequest(call_back=address), ANSWER)
    except PeerLost:
        return None
    return reply, hello


def _hello(asker: Carrier, run_hash: bytes) -> HelloRequest:
    return HelloRequest(protocol=PROTOCOL, run_hash=run_hash, site=Site(node=asker.node))
