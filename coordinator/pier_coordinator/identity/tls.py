"""The coordinator's side of TLS: it accepts the run's nodes and the holders of its invites."""

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
    """The DER form of a certificate, for comparing PEM texts. Raises ValueError."""
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def trusted(invites: Iterable[InviteRow], now: float) -> tuple[InviteRow, ...]:
    """The invites whose holders TLS accepts: the open ones, then the newest closed ones, to tell them what is wrong."""
    ordered = sorted(invites, key=lambda invite: (bool(invite.closed(now)), -invite.created))
    return tuple(ordered[:OPEN_INVITES])


class Trust:
    """Whom TLS accepts; it may change while the server runs. gRPC asks at each new connection, from its own threads."""

    def __init__(self, own: Credentials) -> None:
        self._own = own
        self._configuration = self._configured(())
        self._changed = False

    def change(self, invites: Iterable[InviteRow]) -> None:
        """Trust the holders of these invites from now on."""
        self._configuration = self._configured(invites)
        self._changed = True

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a port that accepts only clients with a certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._fetch,  # type: ignore[arg-type]  # None (not in the stub) means that nothing has changed
            require_client_authentication=True,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration if it has changed since the last connection, else None."""
        if not self._changed:
            return None
        self._changed = False
        return self._configuration

    def _configured(self, invites: Iterable[InviteRow]) -> grpc.ServerCertificateConfiguration:
        roots = b"".join((self._own.ca_pem, *(invite.certificate for invite in invites)))
        return grpc.ssl_server_certificate_configuration([(self._own.key_pem, self._own.cert_pem)], roots)
