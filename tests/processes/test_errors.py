"""What goes wrong at a start is said in words, with a remedy and exit code 1; honest sites do not notice."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from processes.conftest import Found
from processes.run import CORPUS, held
from processes.site import Site

from pier_node.config import load
from pier_node.identity import Token

pytestmark = pytest.mark.processes


def refused(site: Site, *texts: str, within: float = 30.0) -> None:
    """Start a site that must end with an error that says all this."""
    site.start()
    assert site.ended(within) == 1
    assert "Error: " in site.output
    for text in texts:
        assert text in " ".join(site.output.split())


def stranger(near: Site, name: str, *options: str) -> Site:
    return Site(near.folder.parent / name, "--dataset", str(CORPUS), *options)


def test_a_damaged_checkpoint_is_set_aside(found: Found) -> None:
    run = found(2, inner={"total_steps": 60 * 10})
    run.start()
    keeper, other = run.by_node
    other.reach(5)
    other.kill()
    newest = max((other.folder / "checkpoints").glob("round-*"))
    tensors = newest / "state.safetensors"
    damaged = bytearray(tensors.read_bytes())
    damaged[-100] ^= 1
    tensors.write_bytes(damaged)
    with held([keeper]):
        other.start()
        other.take_part()
    run.finish()
    assert f"{newest} is damaged" in " ".join(other.output.split())
    assert f"Going on at round {int(newest.name[6:]) - 1} as" in other.output


def test_strangers_are_turned_away(found: Found) -> None:
    run = found(1, inner={"total_steps": 100_000}, outer={"inner_steps": 10})
    honest = run.sites[0]
    honest.start()
    honest.reach(1)
    run_hash = load(run.path).hash()
    peers = ("--peers", honest.address)
    others = found(1, run={"name": "other"})
    wrong = str(Token.new(run_hash))
    refused(stranger(honest, "wrong-token", *peers, "--token", wrong), "the tokens differ", "--token")
    refused(stranger(honest, "other-run", *peers, "--token", str(others.token)), "another run", "--token")
    refused(stranger(honest, "no-token", *peers), "--peers needs the --token that the first site printed")
    refused(stranger(honest, "mistyped", *peers, "--token", str(run.token)[:-1]), "not a whole token", "Copy the token")
    mixed = stranger(honest, "mixed", "--run", str(others.path), *peers, "--token", str(run.token))
    refused(mixed, "the token is for run", "Use the token of this run")

    honest.reach(honest.round + 3)
    assert len(honest.status()["peers"]) == 0
    assert "WARNING" not in honest.output
    assert honest.stop() == 0


def test_a_folder_belongs_to_one_run(found: Found, tmp_path: Path) -> None:
    run = found(1, inner={"total_steps": 20})
    run.start()
    run.finish()
    run.path.write_text(run.path.read_text().replace("total_steps = 20", "total_steps = 30"))
    refused(run.sites[0], "belongs to another run than", "Choose another --data folder")


def test_a_taken_port_is_named(found: Found) -> None:
    run = found(1)
    host, _, port = run.sites[0].address.rpartition(":")
    with socket.create_server((host, int(port))):
        refused(run.sites[0], run.sites[0].address, "Address already in use", "--listen")


def test_one_folder_runs_once(found: Found) -> None:
    run = found(1, inner={"total_steps": 100_000}, outer={"inner_steps": 10})
    first = run.sites[0]
    first.start()
    first.reach(1)
    twin = Site(first.folder, "--run", str(run.path), "--dataset", str(CORPUS))
    twin.log = first.folder.parent / "twin.log"
    refused(twin, f"another pier-node runs in {first.folder}", "pier-node stop")
    assert (first.folder / "daemon.json").exists()
    assert first.stop() == 0


def test_missing_data_is_named(found: Found, tmp_path: Path) -> None:
    run = found(1)
    site = Site(tmp_path / "site", "--run", str(run.path), "--dataset", str(tmp_path / "nothing here"))
    refused(site, "nothing here", within=60.0)
    shutil.rmtree(site.folder)
