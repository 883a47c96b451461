"""A line with latency and loss: what goes to a host and what comes from it is late, and some of it never arrives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from processes.hosts import WIRE_BRIDGE, Host, sh

from bench.delay_line import TAP_DEVICE, TUN, Line, device, joined

taps = pytest.mark.skipif(not os.path.exists(TUN), reason=f"no {TUN} here: lines with latency and loss are NOT tested")


@contextmanager
def rough(host: Host, line: Line) -> Iterator[None]:
    """Have a host behind such a line meanwhile: a detour between its port and the bridge that all are on."""
    near, far, detour = (f"{name}{host.port}" for name in ("near", "far", "detour"))
    with ExitStack() as stack:
        files = [stack.enter_context(_tap(host.wire, name)) for name in (near, far)]
        sh(f"ip -n {host.wire} link add {detour} type bridge")
        stack.callback(sh, f"ip -n {host.wire} link del {detour}")
        sh(f"ip -n {host.wire} link set {detour} up")
        sh(f"ip -n {host.wire} link set {near} master {detour}")
        sh(f"ip -n {host.wire} link set {far} master {WIRE_BRIDGE}")
        sh(f"ip -n {host.wire} link set {host.port} master {detour}")
        stack.callback(sh, f"ip -n {host.wire} link set {host.port} master {WIRE_BRIDGE}")
        stack.enter_context(joined(files, line))
        yield


@contextmanager
def _tap(namespace: str, name: str) -> Iterator[int]:
    with device(name, TAP_DEVICE) as file:
        sh(f"ip link set {name} netns {namespace}")
        sh(f"ip -n {namespace} link set {name} txqueuelen 10000 up")
        yield file
