"""`pier-node demo --experts`, as a person starts it."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest

from pier_node.demo.experts import DOMAINS
from pier_node.experts.card import load_card
from pier_node.experts.ensemble import load_ensemble

pytestmark = [pytest.mark.processes, pytest.mark.alone]  # experts are planned by the speed that is measured

PATIENCE = 1200.0


def test_three_unequal_sites_make_an_ensemble(tmp_path: Path) -> None:
    program = Path(sysconfig.get_path("scripts")) / "pier-node"
    command = [str(program), "demo", "--experts", "--folder", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["complete"]
    rows = {row["domain"]: row for row in told["experts"]}
    assert {*rows} == {*DOMAINS}
    assert {row["site"] for row in rows.values()} <= {"alpha", "beta", "gamma"}
    ensemble = Path(told["ensemble"])
    members = load_ensemble(ensemble).members
    assert [member.domain for member in members] == [row["domain"] for row in told["experts"]]
    for member in members:
        row = rows[member.domain]
        assert member.stands_in is not row["accepted"]
        if row["accepted"]:
            card = load_card(ensemble / member.folder)
            assert (card.steps, card.loss) == (row["steps"], row["loss"])
            assert abs(card.flops / row["flops"] - 1) < 0.01
    assert sum(row["accepted"] for row in rows.values()) > len(rows) / 2
    assert {*told["scores"]["domains"]} == {*DOMAINS}
