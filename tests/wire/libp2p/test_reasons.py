from __future__ import annotations

import errno
import os
import socket

import pytest

from pier_node.wire.libp2p.host import of_error, of_p2pd


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)), "connection refused: nothing listens there"),
        (OSError(errno.EHOSTUNREACH, ""), "no route to that host"),
        (OSError(errno.ENETUNREACH, ""), "no route to that host"),
        (OSError(errno.ETIMEDOUT, ""), "no connection: it is down, or behind a firewall"),
        (OSError(errno.EACCES, "Permission denied"), "no connection: Permission denied"),
        (OSError("Multiple exceptions: ..."), "no connection: Multiple exceptions: ..."),
        (socket.gaierror(socket.EAI_NONAME, ""), "no such host"),
        (socket.gaierror(socket.EAI_AGAIN, ""), "the host's name cannot be looked up"),
    ],
)
def test_the_kernels_reasons(error: OSError, words: str) -> None:
    assert of_error(error) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("all dials failed\n  * [/ip4/1.2.3.4/tcp/1] dial backoff", "not again for some seconds"),
        ("error opening relay circuit: NO_RESERVATION (204)", "the relay has no way to it"),
        ("failed to negotiate security protocol: peer id mismatch: expected Qm", "another node answers there"),
        ("failed to negotiate security protocol: EOF", "does not speak libp2p"),
        ("protocols not supported: [/pier/1.0.0]", "is no Pier node, or is just starting"),
        ("some\x1b[2J\nnews", "no connection: some [2J news"),
    ],
)
def test_what_p2pd_says(text: str, words: str) -> None:
    assert words in of_p2pd(f"Connect failed. msg={text}")[-len(words) - 60 :]
