"""The choice of the carrier that a site uses: `--transport`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

from pier_node.base.address import parse_address
from pier_node.base.errors import PierError
from pier_node.identity.certificates import Credentials
from pier_node.wire.addresses import are_routes, parse_routes
from pier_node.wire.links import SiteCarrier

Transport = Literal["grpc", "hivemind"]


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
    if importlib.util.find_spec("hivemind") is None:
        raise PierError(
            "--transport hivemind needs hivemind, which is not installed",
            "In the clone of Pier: scripts/install hivemind",
        )
    from pier_node.wire.libp2p.carrier import HivemindCarrier

    return HivemindCarrier(node, run_hash, credentials, folder)
