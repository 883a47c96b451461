"""Scoring and serving at the end of a demo, with the real commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from experts.serving.ensembles import make_ensemble
from rich.console import Console

from pier_node.base.errors import PierError
from pier_node.demo import experts
from pier_node.demo.experts import show_ensemble

pytestmark = pytest.mark.processes


async def test_the_ensemble_is_scored_and_asked(tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    report = await show_ensemble(make_ensemble(tmp_path / "mine", ["topics", "network"]), console)
    assert set(report["domains"]) == {"topics", "network"}
    shown = console.export_text()
    assert f"decay {report['mean']['decay']['bits_per_byte']:.3f}" in shown
    assert "It goes on from 'import '" in shown
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
