"""The hivemind carrier: libp2p streams through hivemind's P2P, for sites that cannot open a port. See carrier.py."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pier_node.certificates import Credentials
from pier_node.errors import PierError
from pier_node.wire.address import format_address, parse_address
from pier_node.wire.allocator import keep_chunk_memory
from pier_node.wire.card import Card
from pier_node.wire.hivemind_client import Link
from pier_node.wire.hivemind_host import PROTOCOL, Host
from pier_node.wire.hivemind_key import KEY_FILE
from pier_node.wire.hivemind_reach import find_unreached
from pier_node.wire.hivemind_relay import RENEWAL, Places
from pier_node.wire.hivemind_server import PeerServer
from pier_node.wire.interfaces import Choice, choose_address
from pier_node.wire.linked_carrier import LinkedCarrier, Tally
from pier_node.wire.multiaddr import Route, first_hop

if TYPE_CHECKING:
    from hivemind.p2p import P2P


class HivemindCarrier(LinkedCarrier):
    """A Carrier over libp2p. Addresses are multiaddrs; see multiaddr.py.

    Args:
        node: this node's id.
        run_hash: hash of the run's configuration; b"" as long as it is not known: only `greet` works then.
        credentials: what proves that this node is in the run; None: names are taken as they are given.
        folder: keeps the libp2p key of a node that listens; None: it has a new one each time.

    Raises:
        PierError: hivemind is not installed.
    """

    def __init__(self, node: str, run_hash: bytes, credentials: Credentials | None, folder: Path | None) -> None:
        _require_hivemind()
        self._run_hash, self._credentials, self._folder = run_hash, credentials, folder
        self._host = Host(Card(node, run_hash, credentials.key if credentials else None), credentials, self._ready)
        self._helpers: list[asyncio.Task[None]] = []
        sent = Tally()
        self._server = PeerServer(self._host, sent.add)
        super().__init__(self._host.card, lambda peer, address: Link(self._host, peer, address), self._server, sent)

    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others; see interfaces.py. Raises PierError."""
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
        """The same, or with relays too, if a peer says that this site needs them."""
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
        """Close all connections and stop listening, within two seconds; whatever is under way fails."""
        for task in self._helpers:
            task.cancel()
        await asyncio.gather(super().stop(), *self._helpers, return_exceptions=True)
        await self._host.stop()

    async def _ready(self, p2p: P2P) -> None:
        await p2p.add_binary_stream_handler(PROTOCOL, self._server.handle)


def _require_hivemind() -> None:
    if importlib.util.find_spec("hivemind") is None:
        raise PierError(
            "--transport hivemind needs hivemind, which is not installed",
            "In the clone of Pier: scripts/install hivemind",
        )
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")  # which hivemind calls otherwise


def _free_port(host: str, port: int) -> int:
    """The port to listen on, after making sure that p2pd can: what it says otherwise is not for people.

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
