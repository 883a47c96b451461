"""The choice of the carrier that a site uses: `--transport`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from pier_node.base.address import parse_address
from pier_node.base.errors import PierError
from pier_node.identity.certificates import Credentials
from pier_node.wire.carrier import Carrier
from pier_node.wire.interfaces import Choice
from pier_node.wire.multiaddr import are_routes, parse_routes

Transport = Literal["grpc", "hivemind"]


class SiteCarrier(Carrier, Protocol):
    """A carrier that a site starts and stops."""

    async def listen(self, at: str, advertise: str | None, peers: Sequence[str]) -> Choice:
        """Listen at HOST:PORT, and choose the address to tell others. Raises PierError.

        Args:
            advertise: HOST or HOST:PORT that the user wants; None to choose one.
            peers: addresses of sites to join; may be empty.
        """

    def refuse(self, nodes: Iterable[str], why: str) -> None:
        """Refuse all contact with these nodes from now on and tell them why; their calls in progress fail."""

    def bytes_sent_to(self, peer: str) -> int:
        """Payload bytes sent to one peer so far."""

    async def stop(self) -> None:
        """Close all connections and stop listening within two seconds; all calls in progress fail."""


def check_address(transport: Transport, address: str) -> None:
    """Check that this carrier can reach nodes at an address of this form. Raises PierError."""
    if transport == "hivemind":
        try:
            parse_routes(address)
        except ValueError as error:
            raise PierError(
                f"--transport hivemind: {error}", "Give the address that the other site printed, with its /p2p/ part."
            ) from error
    elif are_routes(address):
        raise PierError(f"{address} is of a site on libp2p", "Start with --transport hivemind, as that site was.")
    else:
        parse_address(address)


def make_carrier(
    transport: Transport, node: str, run_hash: bytes, credentials: Credentials | None, folder: Path | None = None
) -> SiteCarrier:
    """Create a carrier.

    Args:
        run_hash: hash of the run's configuration; b"" while it is not known, when only `greet` works.
        credentials: prove that this node belongs to the run; None means no encryption and no authentication.
        folder: this site's data folder, if it listens and others should find it again after a restart.

    Raises:
        PierError: a package that the carrier needs is not installed.
    """
    if transport == "grpc":
        from pier_node.wire.grpc.carrier import GrpcCarrier

        return GrpcCarrier(node, run_hash, credentials)
    from pier_node.wire.libp2p.carrier import HivemindCarrier

    return HivemindCarrier(node, run_hash, credentials, folder)
