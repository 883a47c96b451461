"""A small run of the bench."""

from __future__ import annotations

import pytest

from bench.loop_stall import measure


@pytest.mark.parametrize("codec", ["none", "int4"])
async def test_two_sites_train_to_the_end(codec: str) -> None:
    assert 0 < await measure(1, 1, codec) < 10
