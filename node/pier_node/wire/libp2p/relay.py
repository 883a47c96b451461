"""Relays: a site that cannot be reached directly has another accept connections for it (libp2p circuits, version 2).

p2pd can look for relays itself, but it waits for minutes, and for an hour after it lost one. So this module requests a
place at a relay again and again, which also keeps the connection that the relay needs.

It also holds the settings of p2pd, each with its reason; `p2pd --help` lists them all.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from pier_node.wire.libp2p.dial import NoWay, dial, of_p2pd
from pier_node.wire.libp2p.p2pd import P2pd
from pier_node.wire.multiaddr import Route
from pier_proto.v1.circuit_pb2 import CircuitLimit, HopMessage

if TYPE_CHECKING:
    from hivemind.p2p import P2P


_ALWAYS = [
    "-tls=1",
    "-noise=0",  # TLS only: half as fast again, since processors accelerate AES
    "-natPortMap=0",  # a site does not open ports of routers unasked
    "-autonat=0",
    "-relay=1",
    "-connManager=1",
    "-connLo=1536",  # more than there are sites, so that no connection is dropped
    "-connHi=2048",
    f"-persistentConnMaxMsgSize={1 << 18}",  # most bytes that the DHT may send in a message
]

ASKING = [*_ALWAYS, "-noListenAddrs=1", "-dhtClient=1"]
"""Settings of a node that only asks and that nobody asks anything."""


def listening(host: str, port: int) -> list[str]:
    """Settings of a node that others reach, and that relays for unreachable sites. Raises OSError: no such host."""
    return [
        *_ALWAYS,
        f"-hostAddrs={_multiaddr(host, port)}",
        "-dhtServer=1",
        "-forceReachabilityPublic=1",  # libp2p's test knows public addresses only; without this it relays little
        "-relayService=1",
        "-relayBufferSize=1048576",
        "-relayMaxCircuits=256",
        f"-relayDataLimit={1 << 44}",
        "-relayTimeLimit=8760h",
    ]


def _multiaddr(host: str, port: int) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = ipaddress.ip_address(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    return f"/ip{address.version}/{address}/tcp/{port}"


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
    from hivemind.p2p import PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

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


async def relays_enough(relay: Route) -> bool:
    """Whether a p2pd that has just started relays as configured.

    Each p2pd starts two relays, one of them with libp2p's limits (128 KiB per circuit). Which of the two others meet is
    a matter of chance: in one case out of four or five it is the right one (hivemind 1.1.12).
    """

    async def nothing(_p2p: P2P) -> None:
        pass

    asker = P2pd(None, ASKING, nothing)
    try:
        limit = await reserve(await asker.start(), relay)
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
