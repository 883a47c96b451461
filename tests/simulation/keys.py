"""Keys of simulated sites, always the same ones: a site's node id begins with its name."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity.node import Identity

_NUMBERS = {"a1": 304, "b2": 260, "c3": 13, "d4": 353, "e5": 243}
IDENTITIES = {name: Identity(ec.derive_private_key(it, ec.SECP256R1())) for name, it in _NUMBERS.items()}
NODES = {name: identity.node for name, identity in IDENTITIES.items()}
