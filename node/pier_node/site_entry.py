"""A site's entry in the rosters of the run, signed by the site itself, so that others can pass it on."""

from __future__ import annotations

from pier.v1.peer_pb2 import Site
from pier_node.signing import Signer

_PURPOSE = "site"


def sign_entry(site: Site, signer: Signer, version: int) -> Site:
    """Give a node's own entry a version, higher than any before, and its signature; returns the same entry."""
    site.version = version
    site.public = signer.public
    site.signature = signer.sign(_PURPOSE, _statement(site))
    return site


def is_genuine(site: Site, signer: Signer) -> bool:
    """Whether the node that an entry names has signed it, for the signer's run."""
    return signer.verifies(site.node, site.public, site.signature, _PURPOSE, _statement(site))


def _statement(site: Site) -> bytes:
    stated = Site()
    stated.CopyFrom(site)
    stated.ClearField("public")
    stated.ClearField("signature")
    return stated.SerializeToString(deterministic=True)
