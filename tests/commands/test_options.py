from __future__ import annotations

import errno
import getpass
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from pier_node.base.errors import PierError
from pier_node.cli import main
from pier_node.commands import options
from pier_node.commands.options import FOLDER, INSECURE, PEERS, explained, preset, with_token
from pier_node.config.presets import PRESETS


def test_an_error_is_explained_without_a_traceback() -> None:
    @click.command()
    @explained
    def fail() -> None:
        raise PierError("the pier is wet", "Wait for the sun.")

    failed = CliRunner().invoke(fail)
    assert (failed.exit_code, failed.output) == (1, "Error: the pier is wet\nWait for the sun.\n")


def test_what_may_not_be_written_is_explained_too() -> None:
    @click.command()
    @explained
    def fail() -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/data/run.json")

    failed = CliRunner().invoke(fail)
    assert failed.exit_code == 1
    assert failed.output.startswith("Error: /data/run.json: Read-only file system\nMake room, run this as another user")


@pytest.mark.parametrize("words", [["stop", "--timeout"], ["evaluate", "--skip"], ["generate", "x", "--temperature"]])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_amount_is_finite(words: list[str], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(main, [*words, value])
    assert failed.exit_code == 2
    assert f"{value} is not" in failed.output


@pytest.mark.parametrize("words", [["evaluate", "--skip", "0.5", "--plot"], ["score", "folder", "--plot"]])
@pytest.mark.parametrize(
    ("name", "problem"),
    [("picture.what", "ends in .svg or .png or .pdf"), ("gone/picture.png", "there is no folder gone")],
)
def test_what_cannot_be_drawn_is_said_before_the_work(words: list[str], name: str, problem: str) -> None:
    failed = CliRunner().invoke(main, [*words, name])
    assert failed.exit_code == 2
    assert problem in " ".join(failed.output.split())


@pytest.mark.parametrize(
    ("typed", "dialled"),
    [
        (["--peers", "lab.example.org"], ("lab.example.org:7700",)),
        (
            ["--peers", "10.0.0.1,10.0.0.2:7800", "--peers", "fd00::5"],
            ("10.0.0.1:7700", "10.0.0.2:7800", "[fd00::5]:7700"),
        ),
        (["--peers", "/ip4/10.0.0.1/tcp/7700/p2p/Qm"], ("/ip4/10.0.0.1/tcp/7700/p2p/Qm",)),
    ],
)
def test_a_peer_without_a_port_is_dialled_at_piers(typed: list[str], dialled: tuple[str, ...]) -> None:
    @click.command()
    @PEERS
    def join(peers: tuple[str, ...]) -> None:
        assert peers == dialled

    assert CliRunner().invoke(join, typed, catch_exceptions=False).exit_code == 0


def test_a_model_is_chosen_by_its_name() -> None:
    @click.command()
    @preset("What it is for.")
    def choose(preset: str) -> None:
        click.echo(preset)

    for name in PRESETS:
        assert CliRunner().invoke(choose, ["--preset", name]).output == f"{name}\n"
    refused = CliRunner().invoke(choose, ["--preset", "llama-9t"])
    assert refused.exit_code == 2
    assert all(name in refused.output for name in PRESETS)


@click.command()
@with_token
@explained
def show(token: str | None) -> None:
    click.echo(f"{token} {os.environ.get('PIER_TOKEN')}")


@pytest.mark.parametrize(
    ("words", "given", "token"),
    [
        ([], None, "None"),
        (["--token", "a"], None, "a"),
        (["--token-file", "file"], None, "b"),
        (["--token", "-"], None, "c\n"),
        ([], "d", "d"),
        (["--token", "a"], "d", "a"),
        (["--token-file", "file"], "d", "b"),
        ([], "", "None"),
    ],
)
def test_a_token_need_not_be_in_argv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], given: str | None, token: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("b")
    done = CliRunner(env={"PIER_TOKEN": given}).invoke(show, words, input="c\nmore\n")
    assert done.output == f"{token} None\n", "and who is started from there does not get it"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--token", "a", "--token-file", "b"], "--token and --token-file exclude each other"),
        (["--token-file", "/nowhere"], "/nowhere: No such file or directory"),
    ],
)
def test_a_token_that_cannot_be_had_is_said(words: list[str], problem: str) -> None:
    done = CliRunner().invoke(show, words)
    assert done.exit_code == 1
    assert f"Error: {problem}" in done.output


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--peers", "a"], True),
        (["--peers", "a", "--insecure"], False),
        (["--peers", "a", "--data", "known"], False),
        ([], False),
    ],
)
def test_on_a_terminal_a_site_that_joins_is_asked_for_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], asked: bool
) -> None:
    @click.command()
    @with_token
    @PEERS
    @FOLDER
    @INSECURE
    def join(token: str | None, **_options: object) -> None:
        click.echo(str(token))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "run.token").touch()
    monkeypatch.setattr(options, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True), exit=sys.exit))
    monkeypatch.setattr(getpass, "getpass", lambda _prompt: "typed")
    assert CliRunner().invoke(join, words).output == ("typed\n" if asked else "None\n")
