from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pier_node.inner.place import Place


def test_the_launchers_variables_make_the_place() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2", "HOME": "/"}
    assert Place.from_environment(variables) == Place(rank=1, world=4, attempt=2)


def test_without_a_launcher_there_is_no_place() -> None:
    with pytest.raises(KeyError, match="RANK"):
        Place.from_environment({})


def test_a_lone_worker_joins_nothing() -> None:
    Place(rank=0, world=1, attempt=0).join(torch.device("cpu"), "/nowhere/socket")
    assert not dist.is_initialized()
