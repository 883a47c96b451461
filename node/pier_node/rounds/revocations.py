"""The list of sites that the run's operator has revoked, as every site keeps it and passes it on.

The coordinator signs the list with the key of the run's authority, whose certificate each enrolled site holds. So the
list is as good from any peer as from the coordinator, which may be away. Lists have versions: an older one never
replaces a newer one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.identity.node import Identity, Signer, is_signed, node_id, public_der
from pier_node.wire.bounds import parse
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Revocations

FILE = "revoked.json"
REVOKED = "was revoked by the run's operator"
_PURPOSE = "revocations"

log = logging.getLogger(__name__)


def signed(authority: ec.EllipticCurvePrivateKey, run_hash: bytes, version: int, nodes: Collection[str]) -> Revocations:
    """A list, signed by the run's authority."""
    told = Revocations(version=version, nodes=sorted(nodes))
    told.signature = Signer(Identity(authority), run_hash).sign(_PURPOSE, _statement(told))
    return told


class Revoked:
    """The newest list that this site has seen: kept on disk, and applied at once.

    Args:
        folder: this site's data folder; `restore` applies the list in it.
        authority: certificate of the run's authority, PEM.
        bar: excludes these nodes from now on.
    """

    def __init__(self, folder: Path, authority: bytes, run_hash: bytes, bar: Callable[[Iterable[str]], None]) -> None:
        key = x509.load_pem_x509_certificate(authority).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise PierError(f"{folder}: the run's authority has a key of another kind", "Enrol this site again.")
        self._authority = node_id(key)
        self._public = public_der(key)
        self._path, self._run_hash, self._bar = folder / FILE, run_hash, bar
        self._warned = False
        self.newest: Revocations | None = None

    @property
    def version(self) -> int:
        """Version of the newest list; 0 if there is none."""
        return self.newest.version if self.newest else 0

    def restore(self) -> None:
        """Apply the list on disk. Raises PierError if this user may not read it."""
        if not self._path.exists():
            return
        try:
            told = parse(Revocations, bytes.fromhex(str(durable.read_sealed(self._path)["list"])))
        except (durable.Torn, KeyError, ValueError, BadMessage) as torn:
            log.warning("%s is damaged; the peers or the coordinator will tell who was revoked: %s", self._path, torn)
            return
        self._apply(told)

    def take(self, told: Revocations) -> None:
        """Apply and keep a list that another site passed on, if it is newer and the authority signed it."""
        if told.version <= self.version or not self._apply(told):
            return
        try:
            durable.replace(self._path, durable.seal({"list": told.SerializeToString().hex()}))
        except OSError as error:
            log.error("%s: %s: after a restart this site may not know who was revoked", self._path, error.strerror)

    def _apply(self, told: Revocations) -> bool:
        statement = _statement(told)
        if not is_signed(self._authority, self._public, told.signature, _PURPOSE, self._run_hash, statement):
            if not self._warned:
                log.warning("ignored a list of revoked sites that the run's authority did not sign")
            self._warned = True
            return False
        self.newest = told
        self._bar(told.nodes)
        return True


def _statement(told: Revocations) -> bytes:
    """What is signed: a hash, since verified statements are remembered."""
    return hashlib.sha256("\n".join([str(told.version), *told.nodes]).encode()).digest()
