"""Relays: a site that cannot be reached directly has another accept connections for it (libp2p circuits, version 2).

p2pd can look for relays itself, but it waits for minutes, and for an hour after it lost one. So this module requests a
place at a relay again and again, which also keeps the connection that the relay needs.

A site that begins to listen asks other sites of the run to call back, as `pier-node doctor` does, since libp2p's own
test (AutoNAT) knows public addresses only. It asks through a separate libp2p peer, because they must not be connected
to the peer that they are to reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from pier_node.wire.addresses import ROUTES, Route, are_routes, parse_routes
from pier_node.wire.carrier import PROBE, PROTOCOL, Carrier, PeerLost
from pier_node.wire.libp2p.host import NoWay, dial, of_p2pd
from pier_node.wire.libp2p.p2pd import ASKING, P2pd
from pier_proto.v1.circuit_pb2 import CircuitLimit, HopMessage
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, ProbeReply, ProbeRequest, Site

HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x02\x08\x00"
"""A HopMessage of type RESERVE, preceded by its length."""
OK = 100
RENEWAL = 15.0
"""Seconds between two requests for a place: a site may be unreachable this long after its relay restarts."""
ANSWER = 10.0
ENOUGH = 1 << 40
"""Bytes that a circuit must be able to carry."""

log = logging.getLogger(__name__)


async def reserve(p2p: P2P, relay: Route) -> CircuitLimit:
    """Ask a site to accept connections for this node; return what they may carry. Raises NoWay."""
    writer = None
    try:
        async with asyncio.timeout(ANSWER):
            await dial(p2p, [relay])
            _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(relay.peer), HOP)
            writer.write(RESERVE)
            length = int.from_bytes(await reader.readexactly(1))
            if length >= 0x80:  # a two-byte varint: up to 16 KiB
                length += (int.from_bytes(await reader.readexactly(1)) - 1) << 7
            answer = HopMessage.FromString(await reader.readexactly(length))
    except P2PDaemonError as error:
        raise NoWay(of_p2pd(str(error))) from error
    except TimeoutError as error:
        raise NoWay("no answer") from error
    except (OSError, asyncio.IncompleteReadError, DecodeError) as error:
        raise NoWay("it does not answer as a relay") from error
    finally:
        if writer is not None:
            writer.close()
    if answer.status != OK:
        raise NoWay(f"it relays for nobody else (status {answer.status})")
    return answer.limit


class Places:
    """This node's places at relays, kept while it runs.

    Args:
        relays: sites that others can reach.
    """

    def __init__(self, relays: Sequence[Route]) -> None:
        self.relays = relays
        self._told = dict.fromkeys(relays, "")

    async def take(self, p2p: P2P) -> None:
        """Request every place once; log each one that is lost or regained."""
        for relay, problem in zip(self.relays, await asyncio.gather(*(_problem(p2p, it) for it in self.relays))):
            if bool(problem) != bool(self._told[relay]):
                how = f"does not relay for this site: {problem}" if problem else "relays for this site again"
                log.log(logging.WARNING if problem else logging.INFO, "%s:%d %s", relay.host, relay.port, how)
            self._told[relay] = problem

    def routes(self, peer: str) -> list[Route]:
        """The ways to this node, by its peer id, through its relays."""
        return [replace(relay, peer=peer, relay=relay.peer) for relay in self.relays]


async def relays_enough(p2p: P2P, host: str, port: int) -> bool:
    """Whether a p2pd that has just started to listen relays as configured; on loopback this does not matter.

    Each p2pd starts two relays, one of them with libp2p's limits (128 KiB per circuit). Which of the two others meet is
    a matter of chance: in one case out of four or five it is the right one (hivemind 1.1.12).
    """

    async def nothing(_p2p: P2P) -> None:
        pass

    if host == "127.0.0.1":
        return True
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    asker = P2pd(None, ASKING, nothing)
    try:
        limit = await reserve(await asker.start(), Route(here, port, str(p2p.peer_id)))
    except NoWay as error:
        log.warning("cannot see how p2pd relays: %s", error)
        return True
    finally:
        await asker.stop()
    return limit.data == 0 or limit.data >= ENOUGH


async def _problem(p2p: P2P, relay: Route) -> str:
    try:
        await reserve(p2p, relay)
    except NoWay as error:
        return str(error)
    return ""


ASKED = 4
"""Number of sites that are asked."""
CALLED_BACK = 12.0
"""Seconds for an answer: more than a failed call back takes."""


async def find_unreached(
    asker: Carrier, address: str, peers: Sequence[str], run_hash: bytes
) -> tuple[str, list[Route]]:
    """Ask sites of the run to call an address of this node.

    Returns why a site does not reach it, and the sites that could relay for this one; "" if all that answer reach it.

    Args:
        asker: a carrier with this node's id that does not listen.
    """
    answers = await asyncio.gather(*(_called_back(asker, address, peer, run_hash) for peer in peers[:ASKED]))
    told = [answer for answer in answers if answer is not None]
    tried = [reply for reply, _ in told if not reply.declined]
    # Nobody tries an address that no call comes from, such as an address of the network behind a router.
    reasons = [reply.detail or "no connection" for reply in tried or [reply for reply, _ in told] if not reply.reached]
    if not reasons:
        return "", []
    direct: dict[str, Route] = {}
    for _, hello in told:
        for site in [hello.site, *hello.roster]:
            routes = parse_routes(site.address) if are_routes(site.address) and site.node != asker.node else []
            direct |= {route.peer: route for route in routes if len(routes) == 1}  # sites with more have no open port
    return reasons[0], list(direct.values())[: ROUTES - 1]


async def _called_back(
    asker: Carrier, address: str, peer: str, run_hash: bytes
) -> tuple[ProbeReply, HelloReply] | None:
    """Whether a site reaches the address, and what that site knows; None if it cannot be asked."""
    try:
        request = HelloRequest(protocol=PROTOCOL, run_hash=run_hash, site=Site(node=asker.node))
        hello = await asker.greet(peer, request, CALLED_BACK)
        asker.introduce(hello.site.node, peer)
        reply = await asker.call(hello.site.node, PROBE, ProbeRequest(call_back=address), CALLED_BACK)
    except PeerLost:
        return None
    return reply, hello
