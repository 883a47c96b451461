"""The hivemind carrier: libp2p streams through hivemind's P2P, for sites that cannot open a port. See wire/carrier.py.

A site that begins to listen finds out whether others can reach it, and if not, through which relays. libp2p's own test
(AutoNAT) knows public addresses only. So this site asks sites of the run to call back, as `pier-node doctor` does. It
asks through a separate libp2p peer, because they must not be connected to the peer that they are to reach.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pier_node.base.address import format_address, parse_address
from pier_node.base.errors import PierError
from pier_node.base.tasks import cancel_and_wait
from pier_node.identity.certificates import Credentials
from pier_node.wire.carrier import PROBE, PROTOCOL, Carrier, PeerLost
from pier_node.wire.interfaces import Choice, choose_address
from pier_node.wire.libp2p.client import Link
from pier_node.wire.libp2p.host import STREAM_PROTOCOL, Host
from pier_node.wire.libp2p.p2pd import KEY_FILE
from pier_node.wire.libp2p.relay import RENEWAL, Places
from pier_node.wire.libp2p.server import PeerServer
from pier_node.wire.links import LinkedCarrier, Tally, keep_chunk_memory
from pier_node.wire.metadata import CallMetadata
from pier_node.wire.multiaddr import ROUTES, Route, are_routes, first_hop, parse_routes
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, ProbeReply, ProbeRequest, Site

if TYPE_CHECKING:
    from hivemind.p2p import P2P


ASKED = 4
"""Number of sites that are asked."""
ANSWER = 12.0
"""Seconds for an answer: more than a failed call back takes."""


@dataclass(frozen=True)
class Unreached:
    """The answer of a site that does not reach this one, and the sites that could relay for this one."""

    reason: str
    relays: list[Route]


async def find_unreached(asker: Carrier, address: str, peers: Sequence[str], run_hash: bytes) -> Unreached | None:
    """Ask sites of the run to call an address of this node; None if all that answer reach it.

    Args:
        asker: a carrier with this node's id that does not listen.
    """
    answers = await asyncio.gather(*(_called_back(asker, address, peer, run_hash) for peer in peers[:ASKED]))
    told = [answer for answer in answers if answer is not None]
    tried = [reply for reply, _ in told if not reply.declined]
    # Nobody tries an address that no call comes from, such as an address of the network behind a router.
    reasons = [reply.detail or "no connection" for reply in tried or [reply for reply, _ in told] if not reply.reached]
    if not reasons:
        return None
    direct: dict[str, Route] = {}
    for _, hello in told:
        for site in [hello.site, *hello.roster]:
            routes = parse_routes(site.address) if are_routes(site.address) and site.node != asker.node else []
            direct |= {route.peer: route for route in routes if len(routes) == 1}  # sites with more have no open port
    return Unreached(reasons[0], list(direct.values())[: ROUTES - 1])


async def _called_back(
    asker: Carrier, address: str, peer: str, run_hash: bytes
) -> tuple[ProbeReply, HelloReply] | None:
    """Whether a site reaches the address, and what that site knows; None if it cannot be asked."""
    try:
        hello = await asker.greet(peer, _hello(asker, run_hash), ANSWER)
        asker.introduce(hello.site.node, peer)
        reply = await asker.call(hello.site.node, PROBE, ProbeRequest(call_back=address), ANSWER)
    except PeerLost:
        return None
    return reply, hello


def _hello(asker: Carrier, run_hash: bytes) -> HelloRequest:
    return HelloRequest(protocol=PROTOCOL, run_hash=run_hash, site=Site(node=asker.node))


class HivemindCarrier(LinkedCarrier):
    """A Carrier over libp2p. Addresses are multiaddrs; see wire/multiaddr.py.

    Args:
        node: this node's id.
        run_hash: hash of the run's configuration; b"" while it is not known, when only `greet` works.
        credentials: prove that this node belongs to the run; None takes names as given.
        folder: keeps the libp2p key of a node that listens; None creates a new key each time.

    Raises:
        PierError: hivemind is not installed.
    """

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None, folder: Path | None) -> None:
        _require_hivemind()
        self._run_hash, self._credentials, self._folder = run_hash, credentials, folder
        self._host = Host(
            CallMetadata(node, run_hash, credentials.key if credentials else None), credentials, self._ready
        )
        self._helpers: list[asyncio.Task[None]] = []
        sent = Tally()
        self._server = PeerServer(self._host, sent.add)
        super().__init__(self._host.metadata, lambda peer, address: Link(self._host, peer, address), self._server, sent)

    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others; see wire/interfaces.py. Raises PierError."""
        keep_chunk_memory()
        host, port = parse_address(at)
        port = _free_port(host, port)
        p2p = await self._host.start(self._folder / KEY_FILE if self._folder else None, host, port)
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
            found = await find_unreached(asker, choice.address, peers, self._run_hash)
        finally:
            await asker.stop()
        if found is None or not found.relays:
            return choice
        places = Places(found.relays)
        await places.take(await self._host.client())
        self._helpers.append(asyncio.create_task(self._keep(places)))
        through = " or ".join(format_address(relay.host, relay.port) for relay in found.relays)
        why = f"others reach this site through {through}: a site has no way to {found.reason}"
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


def _require_hivemind() -> None:
    if importlib.util.find_spec("hivemind") is None:
        raise PierError(
            "--transport hivemind needs hivemind, which is not installed",
            "In the clone of Pier: scripts/install hivemind",
        )
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames this level


def _free_port(host: str, port: int) -> int:
    """The port to listen on, once it is certain that p2pd can: p2pd's own errors are not fit for people.

    Raises:
        PierError: this address cannot be listened on.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise PierError(
            f"cannot listen on {format_address(host, port)}: {why}", "Choose another address with --listen HOST:PORT."
        ) from error
