from __future__ import annotations

import random
import socket

import pytest

from bench import ports


def test_no_port_is_given_twice_or_to_an_outgoing_connection() -> None:
    given = [ports.free_port() for _ in range(100)]
    assert len(set(given)) == 100
    assert max(given) < int(ports.EPHEMERAL.read_text().split()[0])


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.free_port()
    monkeypatch.setattr(ports, "_given", set())
    with socket.create_server(("127.0.0.1", 0)) as server:
        drawn = iter([server.getsockname()[1], free])
        monkeypatch.setattr(random, "randrange", lambda *_: next(drawn))
        assert ports.free_port() == free


def test_none_left_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_free", lambda port: False)
    with pytest.raises(OSError, match="no free port between 10000 and"):
        ports.free_port()
