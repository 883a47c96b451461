"""The ten mistakes that people make first: each message says what is wrong, and what to type or to change."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import Result

from pier_node.config.run import load
from pier_node.identity.node import Token
from pier_node.rounds.folder import claim
from pier_node.site import join
from pier_node.site.daemon import Daemon
from pier_node.wire.carrier import PeerRefused
from pier_node.wire.grpc.carrier import GrpcCarrier

Call = Callable[..., Result]


@pytest.fixture
def refused(call: Call) -> Callable[..., str]:
    """Calls `pier-node start`, which must end with an error; returns what it printed."""

    def start(*words: object) -> str:
        done = call("start", *words)
        assert done.exit_code == 1, done.output
        assert "Error: " in done.output
        return " ".join(done.output.split())

    return start


Refused = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder, after `pier-node init --sites 2`."""
    monkeypatch.chdir(tmp_path)
    assert call("init", "--sites", 2, "--preset", "llama-tiny").exit_code == 0
    return tmp_path


def test_a_wrong_token(here: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    async def greet(_self: GrpcCarrier, address: str, *_request: object) -> NoReturn:
        raise PeerRefused(address, "its certificate is of another run: the tokens differ")

    monkeypatch.setattr(GrpcCarrier, "greet", greet)
    token = str(Token.new(load(here / "run.toml").hash(), "a" * 16))
    joins = "--peers", "10.0.0.1", "--listen", "127.0.0.1:0"
    told = refused(*joins, "--token", token)
    assert "no peer lets this site in: 10.0.0.1:7700: its certificate is of another run: the tokens differ" in told
    assert "--token that the first site of the run printed, and keeps in run.token of its --data folder" in told
    assert "Copy the token again, from `pier2-` to its last character" in refused(*joins, "--token", token[:-1])
    assert "a token starts with pier2-" in refused(*joins, "--token", "hunter2")
    assert "Use it with --coordinator HOST:PORT" in refused(*joins, "--token", "pierinvite1-abc")
    assert "Give it with --token-file FILE, or as PIER_TOKEN in the environment" in refused(*joins)


def test_a_port_that_is_taken(here: Path, refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = refused("--listen", f"127.0.0.1:{port}")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in told
    assert f"Stop process {os.getpid()} (" in told
    assert f"--listen 127.0.0.1:{port + 1 if port < 65535 else port - 1}" in told
    assert [path.name for path in (here / "pier-data").iterdir()] == ["lock"], "neither a run nor a token was made"


def test_a_path_that_is_wrong(here: Path, refused: Refused) -> None:
    told = refused("--dataset", "/mistyped")
    assert "data path /mistyped: no such file or folder" in told
    assert "Correct [data] path, or give --dataset PATH" in told
    assert not (here / "pier-data").exists()


def test_a_peer_that_does_not_answer(here: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "PATIENCE", -1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    token = Token.new(load(here / "run.toml").hash(), "a" * 16)
    told = refused("--peers", f"127.0.0.1:{port}", "--token", token, "--listen", "127.0.0.1:0")
    assert f"127.0.0.1:{port}: connection refused: nothing listens there" in told
    assert f"`pier-node doctor --peers 127.0.0.1:{port}`" in told


def test_another_configuration(here: Path, site: Path, refused: Refused) -> None:
    told = refused("--run", here / "run.toml", "--data", site)
    assert f"{site} belongs to another run than {here / 'run.toml'}: " in told
    assert "run.toml: data." in told, "the first differences are named"
    assert f"To continue it: pier-node start --data {site}" in told
    token = Token.new(b"another configuration", "a" * 16)
    told = refused("--run", here / "run.toml", "--peers", "10.0.0.1", "--token", token, "--listen", "127.0.0.1:0")
    assert "the token is for run" in told
    assert "start without run.toml to get the configuration from --peers" in told


def test_data_that_are_not_there(here: Path, refused: Refused) -> None:
    (here / "empty").mkdir()
    told = refused("--dataset", "empty")
    assert "data path empty: the folder has no visible file" in told
    assert "Put the data there, correct [data] path, or give --dataset PATH" in told


def test_a_key_that_is_wrong(here: Path, refused: Refused) -> None:
    text = (here / "run.toml").read_text()
    (here / "run.toml").write_text(text.replace("sites =", "sitez ="))
    told = refused()
    assert "run.toml: run.sitez: no such key; allowed here: name, seed, pretrained, sites" in told
    (here / "run.toml").unlink()
    assert "Write one with: pier-node init" in refused("--run", "run.toml")
    assert "`pier-node init`, then `pier-node start`" in refused()
    (here / "run.toml").write_text(text)
    assert "in this folder: `pier-node start --data elsewhere --run run.toml`" in refused("--data", "elsewhere")


def test_a_folder_that_is_read_only(here: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(path: Path, *_how: object, **_more: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    told = refused("--run", "run.toml", "--data", here / "site")
    assert f"{here / 'site'}: Read-only file system" in told
    assert "Name a --data folder that this user can write" in told


def test_control_c_twice(here: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, gone = list[int](), asyncio.Event()

    def leave(code: int) -> None:
        codes.append(code)
        gone.set()

    async def run(self: Daemon) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await self._stopping.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await gone.wait()

    monkeypatch.setattr(Daemon, "run", run)
    monkeypatch.setattr(os, "_exit", leave)
    done = call("start")
    assert codes == [130]
    assert "Leaving the run; once more to leave at once." in done.output
    assert "Left at once. To continue from the last checkpoint:\n\n  pier-node start --data pier-data" in done.output


def test_started_twice(here: Path, refused: Refused) -> None:
    with claim(here / "pier-data"):
        told = refused("--listen", "127.0.0.1:0")
    assert "another pier-node runs in pier-data" in told
    assert "`pier-node stop --data pier-data`" in told
    assert "another --data folder and --listen port" in told
