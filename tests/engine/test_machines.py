"""Ranks that share no memory with the daemon: their parts of the weights travel, and arrive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.ports import free_port
from pier_node.base.shared import SharedVector
from pier_node.engine import machines

RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from pier_node.engine import machines
from pier_node.engine.parameters import Vectors

kind, load, store = sys.argv[1:]
machines.PIECE = 4
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(1, 1)).to(torch.bfloat16)
model.scale = nn.Parameter(torch.tensor(0.0))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("only",))
if kind == "tp":
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
if kind == "fsdp":
    model.scale = None
    fully_shard(model, mesh=mesh)
ranks = machines.Ranks()
assert ranks.away == [1] and ranks.here == (ranks.own == 0)
weights = machines.Weights(Vectors(model, ranks.own), ranks)
weights.load(load)
weights.store(store)
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "length"), [("whole", 35), ("tp", 35), ("fsdp", 34)])
def test_parts_travel_to_a_rank_of_another_machine_and_back(kind: str, length: int, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    load, store, port = SharedVector(length), SharedVector(length), str(free_port())
    load.array[:] = range(length)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), kind, load.path, store.path],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                machines.HOST_VARIABLE: f"machine-{rank}",
            },
        )
        for rank in range(2)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    assert store.array.tolist() == [*range(length)]


def test_pieces_are_bounded_and_cover_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "PIECE", 6)
    for shape in [(), (0,), (13,), (5, 4), (3, 0), (2, 3, 4)]:
        tensor = torch.zeros(shape)
        for piece in machines.pieces(tensor):
            assert 0 < piece.numel() <= max(6, tensor[0].numel() if shape else 1)
            piece += 1
        assert bool((tensor == 1).all())
