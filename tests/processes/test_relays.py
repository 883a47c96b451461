"""Sites that nobody can connect to take part over libp2p, through the one that others do reach."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from processes.hosts import network, on
from processes.run import CORPUS, tiny, toml

pytestmark = [pytest.mark.processes, pytest.mark.netns]

ROUNDS = 6


def test_two_sites_behind_routers_train_with_one_that_is_not(tmp_path: Path) -> None:
    tables = tiny(3, {"data": {"path": str(CORPUS)}, "inner": {"total_steps": ROUNDS * 10}})
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "run.toml").write_text(toml(tables))
    with network(3) as hosts:
        for host in hosts[1:]:
            host.shut()
        sites = [on(hosts[0], tmp_path / "1", "pier-node start --run run.toml --transport hivemind")]
        try:
            sites[0].start()
            sites[0].wait("prints how to join", lambda: "pier-node start --peers" in sites[0].output)
            (printed,) = re.findall(r"^ *(pier-node start .*)$", sites[0].output, re.MULTILINE)
            assert f"/ip4/{hosts[0].address}/tcp/7700/p2p/" in printed
            sites += [on(host, tmp_path / host.address, printed) for host in hosts[1:]]
            for site in sites[1:]:
                shutil.copy(sites[0].folder / "run.token", site.folder.parent)  # as it says
                site.start()
            assert [site.ended() for site in sites] == [0, 0, 0]
            assert sites[0].digests().keys() == set(range(1, ROUNDS + 1))
            assert sites[0].digests() == sites[1].digests() == sites[2].digests()
            assert {len(event["members"]) for site in sites for event in site.events()} == {3}
            for host, site in zip(hosts[1:], sites[1:], strict=True):
                assert f"others reach this site through {hosts[0].address}:7700: a site has no way to " in site.output
                assert f"/ip4/{host.address}/tcp/7700/p2p/" in site.output
                assert "/p2p-circuit/p2p/" in str(site.events()[-1]["address"])
        finally:
            for site in sites:
                print(site.tail())
                site.kill()
