"""transformers' Llama and PyTorch's AdamW through pier.join give the bits of Pier's own trainer."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes.run import CORPUS, Run, toml
from processes.site import Site, wait_until

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("llama_program.py")
ROUNDS, STEPS = 3, 6


def tables(tied: bool) -> dict[str, dict[str, Any]]:
    """A run of three rounds at two sites; every norm is clipped, and the learning rate changes with every step."""
    return {
        "model": {"preset": "llama-tiny", "heads": 4, "kv_heads": 2, "tie_embeddings": tied},
        "data": {"path": str(CORPUS)},
        "inner": {"total_steps": ROUNDS * STEPS, "warmup_steps": 4, "clip_norm": 0.5, "lr": 3e-3, "batch_size": 4},
        "outer": {"algorithm": "pier", "start": "none", "inner_steps": STEPS, "adaptive_steps": False},
    }


@pytest.fixture
def programs() -> Iterator[list[Site]]:
    made: list[Site] = []
    yield made
    for site in made:
        site.kill()


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_transformers_gives_the_anchors_of_our_own_trainer(
    tmp_path: Path, programs: list[Site], tied: bool
) -> None:
    ours = Run(tmp_path / "ours", 2, None, "grpc", **tables(tied))
    try:
        ours.start()
        ours.finish()
    finally:
        for site in ours.sites:
            site.kill()
    run = tmp_path / "theirs.toml"
    run.write_text(toml({name: keys for name, keys in tables(tied).items() if name in ("inner", "outer")}))
    with run.open("a") as file:
        file.write('\n[run]\nname = "theirs"\nsites = 2\n')
    for twin in ours.sites:
        folder = tmp_path / "theirs" / twin.name
        folder.mkdir(parents=True)
        shutil.copy(twin.folder / "node.key", folder)  # batches are drawn by the node's id, and states name it
        way = ["--run", str(run)]
        if programs:
            wait_until("a token", lambda: (programs[0].folder / "run.token").exists() or not programs[0].running)
            way = ["--peers", programs[0].address, "--token-file", str(programs[0].folder / "run.token")]
        command = shlex.join([sys.executable, str(PROGRAM), str(ours.path), str(folder)])
        programs.append(Site(folder, *way, "--exec", command))
        programs[-1].start()
    for site in programs:
        assert site.ended() == 0, site.output
    assert [*programs[0].digests()] == [1, 2, 3]
    for site, twin in zip(programs, ours.sites):
        assert site.digests() == twin.digests()
