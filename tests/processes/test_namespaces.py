"""Two hosts, as far as the kernel is concerned, and a slow line between them: the walk-through of the README."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes.hosts import Host, on, require_namespaces, sh, shape
from processes.run import CORPUS, ENDLESS, tiny, toml
from processes.site import Site

from pier_node.config.run import load
from pier_node.outer.layout import Layout

pytestmark = [pytest.mark.processes, pytest.mark.netns]


ROUNDS = 7
"""So many rounds are over while the state of the second test arrives; a mean takes a fifteenth of the time."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces, joined by a shaped line; everything is gone afterwards."""
    require_namespaces()
    one, two = (Host(f"pier-{os.getpid()}-{side}", f"10.77.0.{side}") for side in (1, 2))
    with ExitStack() as stack:
        for host in (one, two):
            sh(f"ip netns add {host.name}")
            stack.callback(sh, f"ip netns del {host.name}")
        one.ip(f"link add eth0 type veth peer name eth0 netns {two.name}")
        for host in (one, two):
            host.ip(f"addr add {host.address}/24 dev eth0")
            host.ip("link set lo up")
            host.ip("link set eth0 up")
            sh(f"tc -n {host.name} qdisc add dev eth0 root {shape(50)}")
        for host, other in ((one, two), (two, one)):
            host.ip(f"route add default via {other.address}")
        yield one, two


def test_the_walk_through_trains_across_a_slow_line(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    tables: dict[str, dict[str, Any]] = {
        "data": {"path": str(CORPUS)},
        "outer": {"algorithm": "pier", "inner_steps": 10},
    }
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.toml").write_text(toml(tiny(2, tables)))
    sites = [on(hosts[0], tmp_path / "one", "pier-node start --run run.toml")]
    try:
        sites[0].start()
        sites[0].wait("prints how to join", lambda: "pier-node start --peers" in sites[0].output)
        (printed,) = re.findall(r"^ *(pier-node start .*)$", sites[0].output, re.MULTILINE)
        assert f"--peers {hosts[0].address}:7700" in printed
        sites.append(on(hosts[1], tmp_path / "two", printed))
        shutil.copy(sites[0].folder / "run.token", tmp_path / "two")  # as it says
        sites[1].start()
        assert [site.ended() for site in sites] == [0, 0]
        one, two = (site.digests() for site in sites)
        assert set(one) == set(range(1, 11))
        assert set(two) == set(range(2, 11))
        assert one.items() >= two.items()
        for host, site in zip(hosts, sites, strict=True):
            assert host.sent() > site.events()[-1]["bytes_sent"] > 0
    finally:
        end(sites)


def test_a_site_gets_into_a_run_whose_rounds_are_shorter_than_its_state_takes(
    tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    """The line is as slow as the rounds are on this machine. The site takes the steps of those that it missed."""
    tables: dict[str, dict[str, Any]] = {
        "data": {"path": str(CORPUS)},
        "model": {"dim": 128, "layers": 2, "heads": 2, "ffn_dim": 256},
        "inner": ENDLESS,
        "outer": {"algorithm": "diloco", "inner_steps": 10, "codec": "int4"},
    }
    (tmp_path / "run.toml").write_text(toml(tiny(2, tables)))
    here, there = hosts
    (tmp_path / "one").mkdir()
    sites = [on(here, tmp_path / "one", f"pier-node start --run {tmp_path / 'run.toml'}")]
    try:
        sites[0].start()
        sites[0].wait("prints how to join", lambda: "pier-node start --peers" in sites[0].output)
        join = f"pier-node start --peers {here.address}:7700 --token-file {sites[0].folder / 'run.token'}"
        sites.append(on(here, tmp_path / "two", f"{join} --listen {here.address}:7701"))
        sites[1].start()
        sites[1].reach(3)
        began, first = time.monotonic(), sites[1].round
        sites[1].reach(first + 10)
        pace = (time.monotonic() - began) / (sites[1].round - first)
        state = 8 * Layout.of_run(load(tmp_path / "run.toml")).length
        for host in hosts:
            sh(f"tc -n {host.name} qdisc replace dev eth0 root {shape(8e-6 * state / (ROUNDS * pace))}")
        sites.append(on(there, tmp_path / "three", join))
        sites[2].start()
        sites[2].wait("takes part", lambda: len(sites[2].events()) >= 2)
        assert "took the outer steps of the rounds" in sites[2].output
    finally:
        end(sites)


def end(sites: list[Site]) -> None:
    for site in sites:
        print(site.tail())
        site.kill()
