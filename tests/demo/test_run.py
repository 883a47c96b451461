from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner, Result

from pier_node.cli import main
from pier_node.config.run import load
from pier_node.demo import plan, run
from pier_node.demo.plan import Pace
from pier_node.demo.record import Record
from pier_node.demo.sites import Sites


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Runs that would have been trained; each is interrupted at once."""
    records: list[Record] = []

    def interrupted(sites: Sites, path: Path, record: Record, screen: object) -> NoReturn:
        assert len(sites.all) == record.config.run.sites
        assert load(path).hash() == record.config.hash()
        records.append(record)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupted)
    return records


def demo(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--folder", str(folder), *options])


def test_options_reach_the_run(tmp_path: Path, trained: list[Record]) -> None:
    result = demo(tmp_path / "demo", "--steps", "70", "--sites", "5", "--algorithm", "diloco")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "no process is left" in result.stderr
    config = trained[0].config
    assert (config.inner.total_steps, config.run.sites, config.outer.algorithm) == (70, 5, "diloco")
    assert list(trained[0].tracks) == ["alpha", "beta", "gamma", "delta", "epsilon"]


def test_as_many_steps_as_fit(tmp_path: Path, trained: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(sites: int) -> Pace:
        measured.append(sites)
        return Pace(tokens_per_second=6000.0, abreast=2)

    monkeypatch.setattr(plan, "measure", measure)
    assert "This machine trains on 6,000 tokens/s: 450 inner steps." in demo(tmp_path / "demo").stdout
    demo(tmp_path / "demo", "--sites", "2", "--seconds", "30")
    assert measured == [3, 2]
    assert [record.config.inner.total_steps for record in trained] == [450, 210]


def test_a_kept_run_stays_what_it_is(tmp_path: Path, trained: list[Record]) -> None:
    demo(tmp_path, "--steps", "70", "--sites", "2")
    demo(tmp_path, "--steps", "90", "--keep")
    demo(tmp_path, "--steps", "90")
    kept = [(record.config.inner.total_steps, record.config.run.sites) for record in trained]
    assert kept == [(70, 2), (70, 2), (90, 3)]


def test_a_foreign_folder_is_refused(tmp_path: Path, trained: list[Record]) -> None:
    (tmp_path / "thesis").touch()
    result = demo(tmp_path, "--steps", "70")
    assert result.exit_code == 1
    assert "something else than a demo" in result.stderr
    assert (trained, [path.name for path in tmp_path.iterdir()]) == ([], ["thesis"])


@pytest.mark.parametrize("options", [["--sites", "1"], ["--sites", "9"], ["--steps", "0"], ["--seconds", "0"]])
def test_what_cannot_be(tmp_path: Path, options: list[str]) -> None:
    assert demo(tmp_path, *options).exit_code == 2


def test_json_leaves_stdout_alone(tmp_path: Path, trained: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_sites: int) -> Any:
        return Pace(6000.0, 2)

    monkeypatch.setattr(plan, "measure", measure)
    result = demo(tmp_path, "--json")
    assert result.stdout == ""
    assert "450 inner steps" in result.stderr
