"""`pier-node demo --experts`, as a person starts it; and scoring and serving at its end, with the real commands."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from experts.serving.ensembles import make_ensemble
from rich.console import Console

from pier_node.base.errors import PierError
from pier_node.demo import experts
from pier_node.demo.experts import DOMAINS, show_ensemble
from pier_node.experts.card import load_card, load_ensemble

pytestmark = pytest.mark.processes

PATIENCE = 1200.0


@pytest.mark.alone  # experts are planned by the speed that is measured
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


async def test_the_ensemble_is_scored_and_asked(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    report = await show_ensemble(make_ensemble(tmp_path / "mine", ["topics", "network"]), console)
    assert set(report["domains"]) == {"topics", "network"}
    shown = console.export_text()
    assert f"decay {report['mean']['decay']['bits_per_byte']:.3f}" in shown
    assert "It continues 'import '" in shown
    assert "Colours: topics network" in shown
    assert f"pier-node serve --experts {tmp_path / 'mine'}" in shown


async def test_what_cannot_be_scored_is_said(tmp_path: Path) -> None:
    folder = make_ensemble(tmp_path / "mine", ["topics"])
    (folder / "e0" / "model.safetensors").write_bytes(b"")
    with pytest.raises(PierError, match="pier-node score"):
        await show_ensemble(folder, Console())


async def test_a_machine_that_is_too_busy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "DEADLINE", 0.01)
    with pytest.raises(PierError, match=r"was not scored and served within .*\n.*pier-node score"):
        await show_ensemble(make_ensemble(tmp_path / "mine", ["topics"]), Console())
