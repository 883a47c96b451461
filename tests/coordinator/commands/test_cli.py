"""The command line, up to where it asks a coordinator; tests/processes has the rest."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from threading import Thread

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from pier_coordinator.cli import Duration, main
from pier_coordinator.commands.operate import events_table, nodes_table, status_view
from pier_coordinator.identity.home import DATABASE
from pier_coordinator.store.store import Store

SITE = {
    "name": "lab-b",
    "node": "b" * 16,
    "state": "silent",
    "round": 12345,
    "loss": None,
    "tokens_per_second": 2000.4,
    "bytes_sent": 5e6,
    "activity": "pause",
    "address": "",
    "version": "0.1.0",
}


@pytest.mark.parametrize("command", ["start", "invite", "nodes", "status", "pause"])
def test_a_folder_without_a_run_is_named(tmp_path: Path, command: str) -> None:
    words = [command, str(tmp_path)] if command == "start" else [command, "--data", str(tmp_path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert f"Error: {tmp_path} has no run.toml" in done.output


def test_a_coordinator_that_does_not_run_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    assert CliRunner().invoke(main, ["init", str(folder)]).exit_code == 0
    done = CliRunner().invoke(main, ["nodes", "--data", str(folder)])
    assert done.exit_code == 1
    assert f"Start it: `pier-coordinator start {folder}`." in done.output
    (folder / "daemon.json").write_text('{"pid": 1, "http": "http://127.0.0.1:1", "address": "127.0.0.1:2"}')
    done = CliRunner().invoke(main, ["pause", "--data", str(folder)])
    assert (done.exit_code, "no coordinator runs" in done.output) == (1, True)


def test_another_program_at_the_address_of_a_coordinator_that_is_gone_is_no_coordinator(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    assert CliRunner().invoke(main, ["init", str(folder)]).exit_code == 0

    class Other(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")

    with TCPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.handle_request, daemon=True).start()
        known = {"http": f"http://127.0.0.1:{server.server_address[1]}", "address": "127.0.0.1:2"}
        (folder / "daemon.json").write_text(json.dumps(known))
        done = CliRunner().invoke(main, ["pause", "--data", str(folder)])
    assert (done.exit_code, "no coordinator runs" in done.output) == (1, True)


def test_a_coordinator_that_is_busy_is_not_said_to_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier_coordinator.commands.client.ANSWER", 0.1)
    folder = tmp_path / "my-run"
    assert CliRunner().invoke(main, ["init", str(folder)]).exit_code == 0
    with socket.create_server(("127.0.0.1", 0)) as busy:
        known = {"http": f"http://127.0.0.1:{busy.getsockname()[1]}", "address": "127.0.0.1:2"}
        (folder / "daemon.json").write_text(json.dumps(known))
        done = CliRunner().invoke(main, ["pause", "--data", str(folder)])
    assert done.exit_code == 1
    assert "did not answer within 0.1 s" in done.output
    assert "no coordinator runs" not in done.output
    assert f"pier-coordinator status --data {folder}" in done.output


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"{}", b'{"http": 7, "address": "127.0.0.1:2"}'])
def test_a_damaged_daemon_json_is_named(tmp_path: Path, text: bytes) -> None:
    folder = tmp_path / "my-run"
    assert CliRunner().invoke(main, ["init", str(folder)]).exit_code == 0
    (folder / "daemon.json").write_bytes(text)
    done = CliRunner().invoke(main, ["pause", "--data", str(folder)])
    assert done.exit_code == 1
    assert f"Error: {folder / 'daemon.json'} cannot be read: " in done.output
    assert f"`pier-coordinator start {folder}`" in done.output


async def make_database(folder: Path) -> None:
    await Store(folder / DATABASE, lambda _: None).close()


def test_a_coordinator_does_not_start_with_a_damaged_database_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    assert CliRunner().invoke(main, ["init", str(folder)]).exit_code == 0
    asyncio.run(make_database(folder))
    with sqlite3.connect(folder / DATABASE) as connection:
        connection.execute("INSERT INTO snapshots VALUES (1, 0, x'00')")
        connection.execute("INSERT INTO meta VALUES ('snapshot', '1')")
    ports = ("--listen", "127.0.0.1:0", "--page", "127.0.0.1:0")
    words = (sys.executable, "-c", "from pier_coordinator.cli import main; main()", "start", str(folder), *ports)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {folder / DATABASE}: ")
    assert "restore it from a backup" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_cannot_be_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["init", str(tmp_path / "file" / "run")])
    assert done.exit_code == 1
    assert "file/run: Not a directory" in done.output


def test_a_preset_says_which_tokenizer_it_needs(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["init", str(tmp_path / "run"), "--preset", "llama-1b"])
    assert done.exit_code == 0
    assert "Put the tokenizer.json of Llama 2" in done.output
    assert f"after deleting {tmp_path / 'run' / 'run.toml'}" in done.output


def test_help_loads_nothing_heavy() -> None:
    heavy = ("torch", "grpc", "aiohttp", "numpy", "scipy", "pydantic")
    code = f"import sys, pier_coordinator.cli; print([it for it in {heavy} if it in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def shown(view: object) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_tables_are_complete() -> None:
    totals = {"round": 7, "tokens_per_second": 1234.0, "loss": 2.5, "alive": 2, "paused": 1}
    run = {"name": "lark", "algorithm": "pier", "rounds": 20}
    alert = {"text": "lab-b is silent"}
    text = shown(status_view({"run": run, "totals": totals, "alerts": [alert], "sites": [SITE]}))
    for part in (
        "lark",
        "round 7 of 20",
        "1,234 tokens/s",
        "! lab-b is silent",
        "12,345",
        "2,000",
        "5 MB",
        "1 of 2 paused",
    ):
        assert part in text
    assert "b" * 16 in shown(nodes_table([SITE]))
    assert "No site has come yet" in shown(status_view({"run": run, "totals": totals, "alerts": [], "sites": []}))


def test_events_have_their_time_and_site() -> None:
    text = shown(events_table([{"time": 0.0, "name": "lab-b", "text": "is back [after] 3 s", "level": 30}]))
    assert "01-01" in text
    assert "lab-b" in text
    assert "is back [after] 3 s" in text


@pytest.mark.parametrize(
    ("words", "problem"), [(["stage"], "which stage?"), (["replica", "2"], "a replica has no number")]
)
def test_a_stage_has_a_number_and_a_replica_none(tmp_path: Path, words: list[str], problem: str) -> None:
    result = CliRunner().invoke(main, ["assign", "lab-b", *words, "--data", str(tmp_path)])
    assert result.exit_code == 1
    assert problem in result.output
    assert "pier-coordinator assign lab-b" in result.output


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800.0), ("24h", 86400.0), ("7d", 604800.0)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "h", "24", "-1h", "0h", "1.5h", "2w", "\u00b2h", "1" * 5000 + "h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 30m, 24h or 7d"):
        Duration().convert(text, None, None)
