"""TLS: every server's and client's credentials, for sites and the coordinator alike.

Both ends of a connection show a certificate. Sites trust those that the run's authority issued (certificates.py). The
coordinator also accepts the holders of its open invites, whose certificates prove only their keys. A site with nothing
but an invite first looks at the key of the server that answers (`certificate_at`), and then trusts that certificate
alone. With --insecure there are no credentials and no TLS.

Connections of the libp2p carrier are encrypted by p2pd. An identity proof on them (wire/libp2p/host.py) shows the same
certificates.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
from cryptography import x509

from pier_node.base.address import parse_address
from pier_node.identity.certificates import DOMAIN, Credentials

Options = Sequence[tuple[str, Any]]


def channel(address: str, node: str | None, own: Credentials | None, options: Options) -> grpc.aio.Channel:
    """A channel to a node at HOST:PORT.

    Args:
        node: the node id that the server's certificate must hold; None accepts any node of the run.
        own: the credentials that this end shows, and the authority that it trusts; None for no TLS.
    """
    if own is None:
        return grpc.aio.insecure_channel(f"dns:///{address}", options)
    name = ("grpc.ssl_target_name_override", f"{node}.{DOMAIN}" if node else DOMAIN)
    secured = grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.cert_pem)
    return grpc.aio.secure_channel(f"dns:///{address}", secured, [*options, name])


def add_port(server: grpc.aio.Server, address: str, own: Credentials | None) -> int:
    """Have a site's server listen at HOST:PORT, for nodes of its run only; return the port.

    Without credentials of its own it uses no TLS. Raises RuntimeError if gRPC cannot listen there.
    """
    if own is None:
        return server.add_insecure_port(address)
    pair = [(own.key_pem, own.cert_pem)]
    return server.add_secure_port(address, grpc.ssl_server_credentials(pair, own.ca_pem, require_client_auth=True))


class Trust:
    """Whom the coordinator's server accepts besides nodes of the run; this may change while the server runs."""

    def __init__(self, own: Credentials) -> None:
        self._own = own
        self._configuration = self._configured(())
        self._changed = False

    def change(self, certificates: Iterable[bytes]) -> None:
        """Accept the holders of these certificates (PEM) from now on, and no longer those of others."""
        self._configuration = self._configured(certificates)
        self._changed = True

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen at HOST:PORT; return the port. Raises RuntimeError."""
        credentials = grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._fetch,  # type: ignore[arg-type]  # None (not in the stub) means that nothing has changed
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration if it has changed, else None. gRPC asks at each new connection, in its own threads."""
        if not self._changed:
            return None
        self._changed = False
        return self._configuration

    def _configured(self, certificates: Iterable[bytes]) -> grpc.ServerCertificateConfiguration:
        pair = [(self._own.key_pem, self._own.cert_pem)]
        return grpc.ssl_server_certificate_configuration(pair, b"".join((self._own.ca_pem, *certificates)))


def caller_certificate(context: grpc.aio.ServicerContext[Any, Any]) -> bytes | None:
    """The certificate that a caller has shown, PEM; None if it has shown none."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


@lru_cache(maxsize=2048)
def der(pem: bytes) -> bytes:
    """The DER form of a certificate, for comparing PEM texts. Raises ValueError."""
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def certificate_at(address: str, timeout: float) -> x509.Certificate:
    """The certificate of the server at an address, not yet trusted. Blocks for `timeout` seconds at most.

    Raises:
        OSError: there is no answer.
        ValueError: the answer is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(parse_address(address), timeout) as plain,
        context.wrap_socket(plain, server_hostname=DOMAIN) as secured,
    ):
        return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
