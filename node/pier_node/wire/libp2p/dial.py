"""Dialing: makes p2pd connect to a peer, and explains in words for people why it cannot.

After a failed connection p2pd does not try that address again for five seconds, later for minutes. A site that comes
back must be found at once, so this module first tries with its own connection whether anything listens there. It
translates the kernel's errors and p2pd's messages.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pier_node.base.tasks import cancel_and_wait
from pier_node.wire.grpc.reasons import brief
from pier_node.wire.multiaddr import Route

if TYPE_CHECKING:
    from hivemind.p2p import P2P


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


async def dial(p2p: P2P, routes: Sequence[Route]) -> None:
    """Return once p2pd has a connection to a peer. Raises NoWay; there is no deadline.

    Args:
        routes: routes to that one peer.
    """
    from hivemind.p2p import PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

    peer = PeerID.from_base58(routes[0].peer)
    if peer in {known.peer_id for known in await p2p.list_peers()}:
        return
    ways = await _ways([route for route in routes if route.relay != str(p2p.peer_id)])
    try:
        await p2p._client.connect(peer, ways)  # P2P itself connects only to the peers it was started with
    except P2PDaemonError as error:
        raise NoWay(of_p2pd(str(error))) from error


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
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    host, port = way
    first = Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")
    if not route.relay:
        return first
    relay = PeerID.from_base58(route.relay).to_bytes()
    return Multiaddr(first.to_bytes() + _P2P + bytes([len(relay)]) + relay + _CIRCUIT)
