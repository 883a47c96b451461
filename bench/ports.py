"""Ports on this machine for programs that are restarted at the same address.

They are below those that Linux assigns to outgoing connections, which could otherwise take the port of a program that
is down for a moment.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000
TRIES = 1000

_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on and that this process has not been given before. Raises OSError: none is left."""
    above = int(EPHEMERAL.read_text().split()[0])
    for _ in range(TRIES):
        port = random.randrange(LOWEST, above)  # not in order: other processes look for ports too
        if port not in _given and _free(port):
            _given.add(port)
            return port
    raise OSError(f"no free port between {LOWEST} and {above}")


def _free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
