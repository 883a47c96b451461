from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from demo.seen import run_of
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pier_node.base.errors import PierError
from pier_node.cli import main
from pier_node.demo import replicas, sites
from pier_node.demo.picture import Screen
from pier_node.demo.record import Record
from pier_node.demo.replicas import FEWEST, MOST, Pace, inner_steps, measure, steps_within, train
from pier_node.demo.sites import RUN_FILE, Demo, cores, threads_for
from pier_node.outer.schedule import start_steps, total_rounds


class Told(Screen):
    """A screen that does something at its first picture."""

    def __init__(self, act: int = 0) -> None:
        super().__init__(Console(), None)
        self._act = act

    def show(self, record: Record, seconds: float) -> None:
        if self._act:
            os.kill(os.getpid(), self._act)

    def tell(self, text: str) -> None:
        pass


def test_the_run_is_what_sites_read(tmp_path: Path) -> None:
    config = run_of(tmp_path, sites=3, algorithm="pier", steps=600)
    assert (config.run.sites, config.model.preset, config.data.source) == (3, "llama-1m", "stdlib")
    assert (config.inner.total_steps, config.outer.inner_steps, config.outer.start) == (600, 20, "solo")
    assert start_steps(config) == 60
    assert total_rounds(config) // config.inner.eval_every >= 20


def test_noloco_needs_no_start(tmp_path: Path) -> None:
    config = run_of(tmp_path, sites=3, algorithm="noloco", steps=600)
    assert (config.outer.algorithm, config.outer.inner_steps, start_steps(config)) == ("noloco", 20, 0)
    assert (total_rounds(config), config.inner.eval_every) == (30, 1)


def test_synchronous_rounds_are_not_all_validated(tmp_path: Path) -> None:
    config = run_of(tmp_path, sites=2, algorithm="sync", steps=100)
    assert (total_rounds(config), config.inner.eval_every) == (100, 5)


@pytest.mark.parametrize(("steps", "expected"), [(1, 5), (30, 5), (60, 10), (120, 20), (1000, 20)])
def test_rounds_are_shorter_in_short_runs(steps: int, expected: int) -> None:
    assert inner_steps(steps) == expected


def test_steps_within_a_time() -> None:
    # A step of all: 3 sites x 4 x 128 tokens, a tenth of them alone and the rest two sites abreast.
    pace = Pace(tokens_per_second=6000.0, abreast=2)
    a_step = 3 * 4 * 128 * (0.1 + 0.9 / 2) / 6000 * 1.3 + 0.3 / 20
    assert steps_within(90.0, 3, "pier", pace) == int(90 / a_step) // 10 * 10 == 450


def test_synchronous_steps_take_longer() -> None:
    pace = Pace(tokens_per_second=6000.0, abreast=3)
    assert steps_within(90.0, 3, "sync", pace) < steps_within(90.0, 3, "diloco", pace)


@given(st.floats(0.1, 1e4), st.integers(2, 8), st.floats(1.0, 1e7), st.integers(1, 64))
def test_steps_are_bounded_and_round(seconds: float, sites: int, speed: float, abreast: int) -> None:
    steps = steps_within(seconds, sites, "pier", Pace(speed, abreast))
    assert FEWEST <= steps <= MOST
    assert steps % 10 == 0


def test_sites_share_the_cores() -> None:
    assert threads_for(1) == cores()
    assert threads_for(cores()) == threads_for(10 * cores()) == 1


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("sites", [1, 8])
def test_a_machine_has_a_pace(sites: int) -> None:
    pace = measure(sites, seconds=0.0)
    assert pace.tokens_per_second > 0
    assert pace.abreast == (1 if torch.cuda.is_available() else cores())
    assert torch.get_num_threads() == threads_for(sites)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Runs that would have been trained; each is interrupted at once."""
    records: list[Record] = []

    async def interrupted(demo: Demo, record: Record, _screen: object) -> float:
        assert len(demo.sites.all) == record.config.run.sites
        records.append(record)
        os.kill(os.getpid(), signal.SIGINT)
        return await train(demo, record, Told())

    monkeypatch.setattr(replicas, "train", interrupted)
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

    monkeypatch.setattr(replicas, "measure", measure)
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

    monkeypatch.setattr(replicas, "measure", measure)
    result = demo(tmp_path, "--json")
    assert result.stdout == ""
    assert "450 inner steps" in result.stderr


def training(demo: Demo, act: int = 0) -> float:
    """The training of a demo; with `act`, this process gets a signal at the first picture."""
    return demo.perform(train(demo, Record(demo.config, [site.name for site in demo.sites.all]), Told(act)))


def test_sites_that_die_end_the_demo_with_their_logs(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(f'[data]\nsource = "text"\npath = "{tmp_path}/missing"\n')
    with pytest.raises(PierError, match=r"(?s)site \w+ ended with exit code 1; .*\.log ends with:.*missing"):
        training(made := Demo(tmp_path, as_json=False))
    assert not any(site.running for site in made.sites.all)


@pytest.fixture
def heeds_hangups() -> Iterator[None]:
    """Also if these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("heeds_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it(tmp_path: Path, number: int) -> None:
    (tmp_path / RUN_FILE).write_text("")
    with pytest.raises(KeyboardInterrupt):
        training(made := Demo(tmp_path, as_json=False), act=number)
    assert made.sites.all[0].code is not None


def test_silence_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "STILL", 0.0)
    (tmp_path / RUN_FILE).write_text("")
    with pytest.raises(PierError, match=r"(?s)nothing has happened.*alpha: running; .*alpha\.log ends with"):
        training(Demo(tmp_path, as_json=False))
