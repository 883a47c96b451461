"""The coordinator's side of TLS: it lets in the run's nodes, and whoever holds one of its invites."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from functools import lru_cache

import grpc

from pier_coordinator.store.invites import OPEN_INVITES
from pier_coordinator.store.rows import InviteRow
from pier_node.identity.certificates import Credentials


@lru_cache(maxsize=2048)
def der(pem: bytes) -> bytes:
    """A certificate's DER, by which two PEM texts of it are compared. Raises ValueError."""
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def trusted(invites: Iterable[InviteRow], now: float) -> tuple[InviteRow, ...]:
    """The invites whose holders TLS lets in: the open ones, and of the others the newest, to be told what is wrong."""
    ordered = sorted(invites, key=lambda invite: (bool(invite.closed(now)), -invite.created))
    return tuple(ordered[:OPEN_INVITES])


class Trust:
    """Whom TLS lets in; may change while the server runs. gRPC asks at each new connection, from its own threads."""

    def __init__(self, own: Credentials) -> None:
        self._own = own
        self._configuration = self._configured(())
        self._changed = False

    def change(self, invites: Iterable[InviteRow]) -> None:
        """These are the trusted invites from now on."""
        self._configuration = self._configured(invites)
        self._changed = True

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port that takes nobody without a certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._fetch,  # type: ignore[arg-type]  # None, which the stub does not know of: nothing has changed
            require_client_authentication=True,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """What has changed since the last connection."""
        if not self._changed:
            return None
        self._changed = False
        return self._configuration

    def _configured(self, invites: Iterable[InviteRow]) -> grpc.ServerCertificateConfiguration:
        roots = b"".join((self._own.ca_pem, *(invite.certificate for invite in invites)))
        return grpc.ssl_server_certificate_configuration([(self._own.key_pem, self._own.cert_pem)], roots)
