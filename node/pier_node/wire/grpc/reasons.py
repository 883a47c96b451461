"""Why a call failed, in words for people: translates gRPC's statuses and the messages of its core."""

from __future__ import annotations

import grpc
import grpc.aio

from pier_node.wire.carrier import PeerLost, PeerRefused

_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)

_OTHER_RUN = "its certificate is of another run: the tokens differ"
_SIGNS = (
    ("Connection refused", "connection refused: nothing listens there"),
    ("Domain name not found", "no such host"),
    ("lookup failed", "the host's name cannot be looked up"),
    ("No route to host", "no route to that host"),
    ("Network is unreachable", "no route to that host"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS: it was started with --insecure, or is no Pier node"),
    ("Hostname Verification", "another node answers there"),
    ("not yet valid", "its certificate is not valid yet: the clocks of the two sites differ by more than a day"),
    ("certificate has expired", "its certificate has expired: set the clock there, or restart that node"),
    ("CERTIFICATE_VERIFY_FAILED", _OTHER_RUN),
    ("BAD_SIGNATURE", _OTHER_RUN),
    ("keepalive", "the connection went silent"),
)
_WRITE_FAILED = "Internal error from Core"
"""What grpc.aio reports if it could not write; the status that arrived instead, if any, is lost."""


def lost(
    peer: str, error: grpc.aio.AioRpcError, address: str, secure: bool, timeout: float | None, connected: bool
) -> PeerLost:
    """The exception for a call to a peer that ended without an answer.

    Args:
        secure: whether the call uses TLS.
        timeout: its deadline in seconds, if it has one.
        connected: whether there is a connection now.
    """
    code, details = error.code(), brief(error.details() or "")
    if code in _REFUSALS:
        return PeerRefused(peer, details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PeerRefused(peer, "it does not answer that, or not yet")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and connected:
        return PeerLost(peer, f"{address}: no answer within {timeout:.3g} s")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerLost(peer, f"{address}: no connection within {timeout:.3g} s: it is down, or behind a firewall")
    if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
        return PeerLost(peer, f"{address}: the connection was cut off")
    if code is grpc.StatusCode.INTERNAL:
        return PeerLost(peer, f"{address}: it failed to answer, see its log: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        reason = _unavailable(details, secure)
        return (PeerRefused if reason is _OTHER_RUN else PeerLost)(peer, f"{address}: {reason}")
    return PeerLost(peer, f"{address}: {details or code.name}")


def brief(text: str, most: int = 400) -> str:
    """A text as one line that is safe for any terminal and fits in a header."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(line.split())[:most].rstrip()


def _unavailable(details: str, secure: bool) -> str:
    for sign, text in _SIGNS:
        if sign in details:
            return text
    if "failed to connect" not in details:
        return f"the connection was cut off ({details})"
    if "Socket closed" not in details and "reset" not in details:
        return f"no connection: it is down, or behind a firewall ({details})"
    here = "is in another run or was started with --insecure" if secure else "speaks TLS and this node is --insecure"
    return f"it hung up: it {here}, or it is stopping"
