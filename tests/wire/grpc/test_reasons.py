from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.wire.carrier import PeerLost, PeerRefused
from pier_node.wire.grpc.reasons import brief, lost

NODE = "a" * 16
UNREACHED: dict[str, Any] = {"address": "site:7700", "secure": True, "timeout": 5.0, "connected": False}
FAILED = "failed to connect to all addresses; last error: "


def error(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


def reason(code: grpc.StatusCode, details: str | None, of: dict[str, Any] = UNREACHED) -> str:
    found = lost(NODE, error(code, details), **of)
    assert found.node == NODE
    assert not isinstance(found, PeerRefused)
    return found.reason


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (f"{FAILED}ipv4:1.2.3.4:5: connect: Connection refused (111)", "connection refused: nothing listens there"),
        ("errors resolving site:7700: [address lookup failed: Domain name not found]", "no such host"),
        (f"{FAILED}SSL_ERROR_SSL: ...:WRONG_VERSION_NUMBER: ...", "does not speak TLS: it was started with --insecure"),
        (f"{FAILED}UNAUTHENTICATED: Hostname Verification Check failed.", "another node answers there"),
        (f"{FAILED}CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "the clocks of the two sites differ"),
        (f"{FAILED}CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate has expired"),
        (f"{FAILED}CERTIFICATE_VERIFY_FAILED: unable to get issuer", "its certificate is of another run: the tokens"),
        (f"{FAILED}ipv4:1.2.3.4:5: Socket closed", "hung up: it is in another run or was started with --insecure"),
        (f"{FAILED}FD Shutdown", "no connection: it is down, or behind a firewall"),
        ("keepalive watchdog timeout", "the connection went silent"),
        ("Socket closed", r"the connection was cut off \(Socket closed\)"),
    ],
)
def test_a_connection_that_fails_says_why(details: str, words: str) -> None:
    with pytest.raises(PeerLost, match=f"site:7700: .*{words}"):
        raise lost(NODE, error(grpc.StatusCode.UNAVAILABLE, details), **UNREACHED)


def test_without_tls_hanging_up_means_something_else() -> None:
    plain = UNREACHED | {"secure": False, "timeout": None, "connected": False}
    said = reason(grpc.StatusCode.UNAVAILABLE, f"{FAILED}Socket closed", plain)
    assert "it speaks TLS and this node is --insecure" in said


def test_a_deadline_tells_silence_from_no_connection() -> None:
    connected = UNREACHED | {"secure": True, "timeout": 2.5, "connected": True}
    assert reason(grpc.StatusCode.DEADLINE_EXCEEDED, "", connected) == "site:7700: no answer within 2.5 s"
    assert reason(grpc.StatusCode.DEADLINE_EXCEEDED, "").startswith("site:7700: no connection within 5 s: it is down")


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED],
)
def test_a_refusal_is_in_the_peers_words(code: grpc.StatusCode) -> None:
    found = lost(NODE, error(code, "not this round"), **UNREACHED)
    assert isinstance(found, PeerRefused)
    assert found.reason == "not this round"


def test_a_method_that_is_not_served_is_a_refusal() -> None:
    found = lost(NODE, error(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), **UNREACHED)
    assert isinstance(found, PeerRefused)
    assert "does not answer that" in found.reason


def test_a_failure_at_the_peer_points_to_its_log() -> None:
    assert "failed to answer, see its log: KeyError" in reason(grpc.StatusCode.INTERNAL, "KeyError")


def test_what_is_left_keeps_its_name() -> None:
    assert reason(grpc.StatusCode.DATA_LOSS, None) == "site:7700: DATA_LOSS"
    assert reason(grpc.StatusCode.ABORTED, "its stream was cut off") == "site:7700: its stream was cut off"


@given(st.text())
def test_brief_is_one_short_line(text: str) -> None:
    line = brief(text, 20)
    assert len(line) <= 20
    assert line.isprintable()
    assert brief(line, 20) == line
