"""The settings of p2pd, each with its reason. `p2pd --help` says what exists."""

from __future__ import annotations

import ipaddress
import socket

_ALWAYS = [
    "-tls=1",
    "-noise=0",  # TLS alone: half as fast again, since processors know AES
    "-natPortMap=0",  # a site opens no ports of routers unasked
    "-autonat=0",
    "-relay=1",
    "-connManager=1",
    "-connLo=1536",  # more than there are sites: none is hung up on
    "-connHi=2048",
    f"-persistentConnMaxMsgSize={1 << 18}",  # what the DHT may send
]

ASKING = [*_ALWAYS, "-noListenAddrs=1", "-dhtClient=1"]
"""Of a node that nobody asks anything."""


def listening(host: str, port: int) -> list[str]:
    """Of a node that others reach, and that relays for those who are not reached. Raises OSError: no such host."""
    return [
        *_ALWAYS,
        f"-hostAddrs={_multiaddr(host, port)}",
        "-dhtServer=1",
        "-forceReachabilityPublic=1",  # libp2p's own test knows public addresses only; without it nobody relays much
        "-relayService=1",
        "-relayBufferSize=1048576",
        "-relayMaxCircuits=256",
        f"-relayDataLimit={1 << 44}",
        "-relayTimeLimit=8760h",
    ]


def _multiaddr(host: str, port: int) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = ipaddress.ip_address(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    return f"/ip{address.version}/{address}/tcp/{port}"
