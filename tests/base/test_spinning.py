from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from pier_node.base.processes import spin_little
from pier_node.cli import main

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)


def test_every_command_has_its_threads_spin_a_little() -> None:
    assert CliRunner().invoke(main, ["init", "--help"]).exit_code == 0
    assert [os.environ[name] for name in NAMES] == ["PASSIVE", "1000"]


def test_who_knows_better_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    spin_little()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
