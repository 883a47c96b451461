from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from commands.conftest import CONFIG, save_round

from pier_node.outer.schedule import total_rounds
from pier_node.rounds.folder import SiteRecord
from pier_node.site.running import TAIL, last_event, on_disk, start_command
from pier_node.site.settings import Settings

Call = Callable[..., Result]


def test_the_newest_checkpoint_is_described(site: Path) -> None:
    state = save_round(site, 4)
    old = site / "checkpoints" / "round-00000004"
    os.utime(old, (old.stat().st_mtime - 600,) * 2)
    found = on_disk(site)
    assert 599 < found.pop("age_seconds") < 700
    assert found == {
        "data": str(site),
        "command": f"pier-node start --data {site}",
        "run": "small",
        "run_hash": CONFIG.hash().hex(),
        "rounds": total_rounds(CONFIG),
        "round": 4,
        "digest": state.digest.hex(),
        "inner_step": 40,
        "tokens": 4000,
    }


def test_a_run_without_a_checkpoint_and_a_folder_without_a_run(site: Path, tmp_path: Path) -> None:
    for file in sorted((site / "checkpoints").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    assert set(on_disk(site)) == {"data", "command", "run", "run_hash", "rounds"}
    assert on_disk(tmp_path / "new") == {
        "data": str(tmp_path / "new"),
        "command": f"pier-node start --data {tmp_path / 'new'} --run run.toml",
    }


def test_a_command_can_be_pasted() -> None:
    assert start_command(Path("my site"), None) == "pier-node start --data 'my site'"


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ({}, "pier-node start --data {}"),
        ({"command": "torchrun train.py"}, "pier-node start --data {} --exec 'torchrun train.py'"),
        ({"program_socket": Path("socket")}, "run your program again, with folder='{}'"),
    ],
    ids=["Pier's trainer", "exec", "a program that calls pier.join"],
)
def test_what_trains_at_a_site_is_part_of_what_continues_it(
    site: Path, call: Call, given: dict[str, Any], again: str
) -> None:
    Settings(site, **given).noted(SiteRecord(founder=True, slot=1)).save(site)
    assert on_disk(site)["command"] == again.format(site)
    assert again.format(site) in " ".join(call("status", "--data", site).output.split()).replace("/ ", "/")


def test_the_last_event_is_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert last_event(tmp_path) == {}
    path.write_text('{"round": 1')
    assert last_event(tmp_path) == {}
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert last_event(tmp_path) == {"round": 2}


def test_the_last_event_of_a_long_run_is_found_at_its_end(tmp_path: Path) -> None:
    lines = [json.dumps({"round": number, "padding": "x" * 1000}) for number in range(1, 200)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert (tmp_path / "events.jsonl").stat().st_size > 2 * TAIL
    assert last_event(tmp_path)["round"] == 199
