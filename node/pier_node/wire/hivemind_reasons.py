"""Why a way on libp2p is closed, in words for people: the kernel's errors and the texts of p2pd, translated."""

from __future__ import annotations

import errno
import socket

from pier_node.wire.grpc_reasons import brief

_SIGNS = (
    ("peer id mismatch", "another node answers there"),
    ("NO_RESERVATION", "the relay has no way to it: that site is down, or just starting"),
    ("RESOURCE_LIMIT_EXCEEDED", "the relay has as many connections as it may have"),
    ("protocols not supported", "whoever answers there is no Pier node, or is just starting"),
    ("failed to negotiate", "whoever answers there does not speak libp2p, or is in another version of it"),
    ("dial backoff", "no connection: tried a moment ago, and not again for some seconds"),
    ("i/o timeout", "no connection: it is down, or behind a firewall"),
    ("deadline exceeded", "no connection: it is down, or behind a firewall"),
)
_ERRORS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there",
    errno.EHOSTUNREACH: "no route to that host",
    errno.ENETUNREACH: "no route to that host",
    errno.ETIMEDOUT: "no connection: it is down, or behind a firewall",
}


def of_error(error: OSError) -> str:
    """Why a TCP connection could not be made."""
    if isinstance(error, socket.gaierror):
        return "no such host" if error.errno == socket.EAI_NONAME else "the host's name cannot be looked up"
    return _ERRORS.get(error.errno or 0, f"no connection: {error.strerror or error}")


def of_p2pd(text: str) -> str:
    """What p2pd says of a peer that it does not reach."""
    for sign, words in _SIGNS:
        if sign in text:
            return words
    return f"no connection: {brief(text.removeprefix('Connect failed. msg='))}"
