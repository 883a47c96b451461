from __future__ import annotations

import torch
import torch.distributed as dist

from pier_node.trainer.worker import Place


def test_a_lone_worker_joins_nothing() -> None:
    Place(rank=0, world=1, attempt=0).join(torch.device("cpu"), "/nowhere/socket")
    assert not dist.is_initialized()
