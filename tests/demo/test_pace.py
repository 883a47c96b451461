from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pier_node.demo.plan import cores, measure, threads_for


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("sites", [1, 8])
def test_a_machine_has_a_pace(sites: int) -> None:
    pace = measure(sites, seconds=0.0)
    assert pace.tokens_per_second > 0
    assert pace.abreast == (1 if torch.cuda.is_available() else cores())
    assert torch.get_num_threads() == threads_for(sites)
