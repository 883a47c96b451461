"""What the operator can do, on a coordinator that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.cases import ALICE, Running, running

from pier_coordinator.commands.init import init
from pier_coordinator.home import Home
from pier_coordinator.operator import Operator
from pier_coordinator.refusals import Refused


def operator(run: Running, folder: Path) -> Operator:
    init(folder, "llama-tiny")
    return Operator(run.coordinator, Home.found(folder), "10.0.0.9:7790")


async def test_of_an_invite_that_is_taken_back_it_is_told_who_came_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        await run.let_in(ALICE)
        unused = (await operates.invite("lab-b", 3600.0, 1))["id"]
        assert await operates.revoke(unused) == {"invite": unused, "sites": []}
        used = f"for-{ALICE.node}"
        assert await operates.revoke(used) == {"invite": used, "sites": ["lab-0"]}
        assert run.coordinator.sites[ALICE.node].revoked_at is None
        assert await operates.revoke("lab-0") == {"site": "lab-0"}
        assert await operates.revoke(used) == {"invite": used, "sites": []}


async def test_there_is_one_open_invite_to_a_name(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        operates = operator(run, tmp_path / "my-run")
        for _ in range(2):
            await operates.invite("", 3600.0, 1)
        first = (await operates.invite("lab-b", 3600.0, 1))["id"]
        with pytest.raises(Refused, match=rf"give another --name, or .* \(pier-coordinator revoke {first}\)"):
            await operates.invite("lab-b", 3600.0, 1)
        await operates.revoke(first)
        await operates.invite("lab-b", 3600.0, 1)
        run.wall.now += 3601.0
        await operates.invite("lab-b", 3600.0, 1)
