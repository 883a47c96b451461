"""The demo of a pipeline: its run, its options, and the whole of it with a site that is killed."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from pier_coordinator.commands.client import Client
from pier_node.base.errors import PierError
from pier_node.cli import main
from pier_node.config.run import RunConfig, load
from pier_node.demo import pipeline
from pier_node.demo.pipeline import PipelineResult, write_run
from pier_node.outer.schedule import total_rounds
from pier_node.trainer.model.export import import_weights


def test_options_reach_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    def run(*options: object) -> bool:
        seen.append(options)
        return True

    monkeypatch.setattr(pipeline, "run_pipeline_demo", run)
    words = ["demo", "--pipeline", "--folder", str(tmp_path), "--steps", "7", "--kill-at", "3", "--json"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert seen == [(tmp_path, 7, 3, "sync", True)]


def run_of(folder: Path, algorithm: str) -> RunConfig:
    write_run(folder / "run.toml", 20, algorithm)
    return load(folder / "run.toml")


def test_its_run_has_four_stages_at_six_sites_and_skips_one(tmp_path: Path) -> None:
    config = run_of(tmp_path, "sync")
    assert (config.run.sites, config.pipeline.stages, config.pipeline.path_length) == (6, 4, 3)
    assert config.inner.total_steps == 20


def test_its_stages_send_each_other_int8(tmp_path: Path) -> None:
    section = run_of(tmp_path, "sync").pipeline
    assert (section.activation_codec, section.gradient_codec) == ("int8", "int8")


def test_its_replicas_can_meet_in_outer_rounds(tmp_path: Path) -> None:
    config = run_of(tmp_path, "noloco")
    assert (config.outer.algorithm, config.outer.inner_steps, config.outer.start) == ("noloco", pipeline.APART, "none")
    config = run_of(tmp_path, "pier")
    assert (config.outer.algorithm, config.outer.inner_steps, config.outer.start) == ("pier", pipeline.APART, "sync")
    assert total_rounds(config) == 20 + 3


class Looker(threading.Thread):
    """Asks the coordinator of a demo what its sites have measured, draws and plans, while they train."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.over = folder, threading.Event()
        self.told: dict[str, Any] = {}
        self.chart, self.planned, self.refused = "", dict[str, Any](), ""

    def run(self) -> None:
        while not self.over.wait(0.2) and not (self.chart and self.planned):
            with suppress(PierError, OSError):
                client = Client.of(self.folder)
                self.told = client.get("/api/pipeline")
                if self.told["plan"] and not self.chart:
                    with urlopen(f"{client.http}/api/pipeline/chart.svg", timeout=10) as answer:
                        self.chart = answer.read().decode()
                if not self.refused or all(site["forward"] for site in self.told["sites"]):
                    self._plan()

    def _plan(self) -> None:
        if self.planned:
            return
        program = f"{sysconfig.get_path('scripts')}/pier-coordinator"
        asked = [program, "paths", "plan", "--data", str(self.folder), "--seconds", "0.1", "--json"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
        self.planned = json.loads(done.stdout) if done.returncode == 0 else {}
        self.refused = self.refused or done.stderr


@pytest.mark.processes
def test_it_trains_loses_a_site_and_goes_on_while_somebody_looks(tmp_path: Path) -> None:
    words = ["demo", "--pipeline", "--folder", str(tmp_path / "demo"), "--steps", "20", "--kill-at", "4", "--json"]
    looker = Looker(tmp_path / "demo" / "coordinator")
    looker.start()
    done = CliRunner().invoke(main, words)
    looker.over.set()
    looker.join()
    assert done.exit_code == 0, done.output
    assert looker.refused.startswith("Error: "), "there was nothing measured when it began"
    assert len(looker.planned["measured"]["sites"]) >= 5
    assert {it["stage"] for it in looker.planned["measured"]["sites"]} == {0, 1, 2, 3}
    assert all(it["forward"] and it["transfer"] and it["round_trip"] for it in looker.planned["measured"]["sites"])
    assert looker.planned["makespan_s"] > 0
    assert looker.told["plan"]["title"] == "6 microbatches through 3 of 4 stages"
    assert looker.chart.startswith("<svg")
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(PipelineResult.__annotations__) <= set(result)
    assert result["steps"] == 20
    assert result["killed"]
    assert result["empty_rounds"] <= 2
    assert result["final_loss"] < result["initial_loss"] - 0.5
    assert "The paths of an iteration, 6 microbatches through 3 of 4 stages" in done.stderr
    config, flat = import_weights(Path(result["export"]))
    assert config.layers == 5
    assert flat.isfinite().all()
