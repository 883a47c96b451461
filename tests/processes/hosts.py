"""Hosts, as far as the kernel is concerned: network namespaces of this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes.run import NO_NAMESPACES
from processes.site import PROGRAM, Site

NO_NEW_CONNECTIONS = "7,48 0 0 23,21 0 3 6,48 0 0 47,84 0 0 18,21 1 0 2,6 0 0 0,6 0 0 2"
"""Classic BPF: of TCP over IPv4, drop what has SYN and no ACK, the first packet of a connection."""


def have_namespaces() -> bool:
    """Whether hosts can be made on this machine."""
    return os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("tc"))


def require_namespaces() -> None:
    """Skip the test where there are none."""
    if not have_namespaces():
        pytest.skip(NO_NAMESPACES)


def shape(mbit: float) -> str:
    """A queueing discipline of `tc` that lets so many Mbit/s out."""
    return f"tbf rate {mbit:g}mbit burst 64kb latency 300ms"


WIRE_BRIDGE = "bridge"


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the line in it.

    Attributes:
        wire: the namespace that joins the lines of all, if there are more than two hosts.
        port: the other end of this host's line, there.
    """

    name: str
    address: str
    wire: str = ""
    port: str = ""

    def ip(self, command: str) -> None:
        sh(f"ip -n {self.name} {command}")

    def sent(self) -> int:
        """Bytes that went through its end of the line."""
        return bytes_sent(f"tc -n {self.name}")

    def shut(self) -> None:
        """Let nobody connect to it from now on, as a home router does; it connects to others as before."""
        sh(f"tc -n {self.name} qdisc add dev eth0 clsact")
        sh(f"tc -n {self.name} filter add dev eth0 ingress bpf da bytecode '{NO_NEW_CONNECTIONS}'")


def sh(command: str) -> str:
    """What a command prints."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def bytes_sent(tc: str) -> int:
    """Bytes that left by eth0 since it was first shaped, as the kernel counts them where this `tc` is."""
    return int(json.loads(sh(f"{tc} -s -j qdisc show dev eth0"))[0]["bytes"])


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Hosts on one wire."""
    require_namespaces()
    wire = f"pier-{os.getpid()}-wire"
    hosts = [
        Host(f"pier-{os.getpid()}-{number}", f"10.78.0.{number}", wire, f"port{number}")
        for number in range(1, count + 1)
    ]
    with ExitStack() as stack:
        for name in (wire, *(host.name for host in hosts)):
            sh(f"ip netns add {name}")
            stack.callback(sh, f"ip netns del {name}")
        sh(f"ip -n {wire} link add {WIRE_BRIDGE} type bridge")
        sh(f"ip -n {wire} link set {WIRE_BRIDGE} up")
        for host in hosts:
            host.ip(f"link add eth0 type veth peer name {host.port} netns {wire}")
            sh(f"ip -n {wire} link set {host.port} master {WIRE_BRIDGE} up")
            host.ip(f"addr add {host.address}/24 dev eth0")
            host.ip("link set lo up")
            host.ip("link set eth0 up")
            host.ip("route add default dev eth0")
        yield hosts


def on(host: Host, folder: Path, command: str) -> Site:
    """A site at a host, started by a command as a user types it, in a folder of its own."""
    site = Site(folder / "pier-data")
    program, *words = shlex.split(command)
    assert program == "pier-node"
    site.command = ["ip", "netns", "exec", host.name, str(PROGRAM), *words]
    return site
