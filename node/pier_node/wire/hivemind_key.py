"""The libp2p key of a site, as p2pd reads it: an ECDSA key on P-256 in libp2p's format, in a file of the data folder.

The peer id in a site's multiaddrs is the hash of this key: as long as it is kept, they stay the same.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.identity import write_private

KEY_FILE = "p2p.key"


def make_key(path: Path) -> Path:
    """The key file at a path, made at the first start."""
    from hivemind.proto.crypto_pb2 import KeyType, PrivateKey

    if not path.exists():
        key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        write_private(path, PrivateKey(key_type=KeyType.ECDSA, data=key).SerializeToString())
    return path
