from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from demo.seen import record

from pier_node.base.errors import PierError
from pier_node.demo import train as module
from pier_node.demo.record import Record
from pier_node.demo.sites import Sites
from pier_node.demo.train import train


class Told:
    """A screen that does something at its first picture."""

    def __init__(self, act: int = 0) -> None:
        self._act, self.texts = act, list[str]()

    def show(self, record: Record, seconds: float) -> None:
        if self._act:
            os.kill(os.getpid(), self._act)

    def tell(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def blank(tmp_path: Path) -> Record:
    return Record(record(tmp_path).config, ["alpha", "beta", "gamma"])


def test_sites_that_die_end_the_demo_with_their_logs(tmp_path: Path, blank: Record) -> None:
    sites, run = Sites(tmp_path, 3, threads=1), tmp_path / "run.toml"
    run.write_text(f'[data]\nsource = "text"\npath = "{tmp_path}/missing"\n')
    with pytest.raises(PierError, match=r"(?s)site \w+ ended with exit code 1; .*\.log ends with:.*missing"):
        train(sites, run, blank, Told())
    assert not any(site.running for site in sites.all)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it(tmp_path: Path, blank: Record, number: int) -> None:
    sites = Sites(tmp_path, 3, threads=1)
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(KeyboardInterrupt):
        train(sites, tmp_path / "run.toml", blank, Told(act=number))
    assert sites.all[0].started
    assert not sites.all[0].running


def test_silence_is_not_waited_for_forever(tmp_path: Path, blank: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STILL", 0.0)
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(PierError, match=r"(?s)nothing has happened.*alpha: no answer yet"):
        train(Sites(tmp_path, 3, threads=1), tmp_path / "run.toml", blank, Told())
