"""What goes wrong at a start is said in words, with a remedy and exit code 1; honest sites do not notice."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from processes.program import ENVIRONMENT
from processes.run import CORPUS, Found, held
from processes.site import Site

from pier_node.config.run import load
from pier_node.identity.node import Token

pytestmark = pytest.mark.processes


LONG: dict[str, Any] = {"run": {"seed": 1}, "inner": {"total_steps": 100_000}}


def refused(site: Site, *texts: str) -> None:
    """Start a site that must end with an error that says all this."""
    site.start()
    assert site.ended() == 1
    assert "Error: " in site.output
    for text in texts:
        assert text in " ".join(site.output.split())


def stranger(near: Site, name: str, *options: str) -> Site:
    return Site(near.folder.parent / name, "--dataset", str(CORPUS), *options)


def test_a_damaged_checkpoint_is_set_aside(found: Found) -> None:
    run = found(2, inner={"total_steps": 60 * 10})
    run.start()
    leader, other = run.by_node
    other.reach(5)
    other.kill()
    newest = max((other.folder / "checkpoints").glob("round-*"))
    tensors = newest / "state.safetensors"
    damaged = bytearray(tensors.read_bytes())
    damaged[-100] ^= 1
    tensors.write_bytes(damaged)
    with held([leader]):
        other.start()
        other.take_part()
    run.finish()
    assert f"{newest} is damaged" in " ".join(other.output.split())
    assert f"Resuming at round {int(newest.name[6:]) - 1} as" in other.output


def test_strangers_are_turned_away(found: Found) -> None:
    run, other_run = found(1, **LONG), found(1, run={"name": "other"})
    honest, join = run.sites[0], ("--peers", run.sites[0].address)
    honest.start()
    honest.reach(1)
    wrong = str(Token.new(load(run.path).hash()))
    refused(stranger(honest, "wrong-token", *join, "--token", wrong), "the tokens differ", "Start it with the --token")
    token = str(other_run.token)
    refused(stranger(honest, "other-run", *join, "--token", token), "of another run", "Start it with the --token")
    refused(stranger(honest, "no-token", *join), "--peers needs the --token that the first site printed")
    token = str(run.token)
    refused(stranger(honest, "mistyped", *join, "--token", token[:-1]), "not a whole token", "Copy the token again")
    mixed = stranger(honest, "mixed", "--run", str(other_run.path), *join, "--token", token)
    refused(mixed, "the token is for run", "Use the token of this run")
    honest.reach(honest.round + 3)
    assert honest.status()["peers"] == []
    assert "WARNING" not in honest.output
    assert honest.stop() == 0


def test_a_folder_is_of_one_run_and_of_one_daemon(found: Found) -> None:
    run = found(1, **LONG)
    honest = run.sites[0]
    honest.start()
    honest.reach(1)
    twin = Site(honest.folder, "--run", str(run.path))
    twin.log = honest.folder.parent / "twin.log"
    refused(twin, f"another pier-node runs in {honest.folder}", "pier-node stop")
    honest.reach(honest.round + 3)
    assert honest.status()["node"] == honest.node
    assert honest.stop() == 0
    run.path.write_text(run.path.read_text().replace("seed = 1", "seed = 2"))
    refused(honest, "belongs to another run than", "choose another --data folder")


def test_a_site_whose_folder_is_deleted_says_so_and_ends(found: Found) -> None:
    site = found(1, **LONG).sites[0]
    site.start()
    site.reach(1)
    shutil.rmtree(site.folder, ignore_errors=True)
    assert site.ended() == 1
    assert "was deleted or moved while this site ran" in " ".join(site.output.split())


def test_what_ends_a_site_is_said_though_its_folder_cannot_be_tidied(found: Found) -> None:
    site = found(1, **LONG).sites[0]
    site.start()
    site.reach(1)
    (site.folder / "daemon.json").unlink()
    (site.folder / "daemon.json").mkdir()
    shutil.rmtree(site.folder / "checkpoints")
    (site.folder / "checkpoints").write_text("a file where states are written")
    assert site.ended(20.0) == 1
    assert "Error: cannot save a checkpoint in" in " ".join(site.output.split())


def test_a_taken_port_is_named(found: Found) -> None:
    run = found(1)
    host, _, port = run.sites[0].address.rpartition(":")
    with socket.create_server((host, int(port))):
        refused(run.sites[0], run.sites[0].address, "Address already in use", "--listen")


def test_a_newcomer_whose_workers_cannot_start_says_so_though_it_waits_for_the_solo_start(
    found: Found, tmp_path: Path
) -> None:
    run = found(1, run={"sites": 2}, outer={"start": "solo", "start_fraction": 0.5}, inner={"total_steps": 100_000})
    founder = run.sites[0]
    founder.start()
    founder.reach(1)
    newcomer = stranger(founder, "newcomer", "--peers", founder.address, "--token", str(run.token))
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')")
    places = os.pathsep.join((str(tmp_path), ENVIRONMENT.get("PYTHONPATH", "")))
    newcomer.command = ["env", f"PYTHONPATH={places}", *newcomer.command]
    refused(newcomer, "the training program ends again and again", "libcudart.so: cannot open")
    assert "one site makes the run's start alone" in newcomer.output
    assert founder.stop() == 0


def test_until_the_first_round_whatever_was_wrong_can_be_corrected(found: Found, tmp_path: Path) -> None:
    run = found(1, **LONG)
    site = run.sites[0]
    refused(Site(site.folder, "--run", str(run.path), "--dataset", str(tmp_path / "nothing here")), "nothing here")
    assert [path.name for path in site.folder.iterdir()] == ["node.key"]

    small = tmp_path / "small.txt"
    small.write_text("line\n" * 100)
    short = Site(site.folder, "--run", str(run.path), "--dataset", str(small))
    refused(short, "one window of model.context = 64 needs 65", "lower model.context")
    run.path.write_text(run.path.read_text().replace("[model]", "[model]\ncontext = 32"))
    corrected = Site(site.folder, "--run", str(run.path), "--dataset", str(CORPUS))
    corrected.start()
    corrected.reach(1)
    assert f"This site trains on its own data, {CORPUS}: all except" in corrected.output
    assert corrected.stop() == 0
