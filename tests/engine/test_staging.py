"""Tensors are copied in pieces that fit, whatever their shapes, and none of their values is left out."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pier_node.engine.staging import ALIGNED, batches, put, take

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4)


@given(SHAPES, st.integers(4, 200), st.sampled_from([torch.float32, torch.bfloat16]))
def test_pieces_fit_and_make_up_the_whole(shapes: list[list[int]], most: int, dtype: torch.dtype) -> None:
    pairs = [(torch.zeros(shape, dtype=dtype), torch.randn(shape)) for shape in shapes]
    for batch in batches(pairs, most):
        end = 0
        for place, (own, host) in batch:
            assert end <= place <= most - own.nbytes
            assert place % ALIGNED == 0
            assert own.shape == host.shape
            own.add_(host)
            end = place + own.nbytes
    for own, host in pairs:
        assert torch.equal(own, host.to(dtype))


@given(SHAPES)
def test_what_is_taken_is_what_is_put(shapes: list[list[int]]) -> None:
    given = [torch.randn(shape) for shape in shapes]
    own, back = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes]
    take(zip(own, given))
    put(zip(own, back))
    assert all(map(torch.equal, given, back))
