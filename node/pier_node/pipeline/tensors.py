"""Tensors as the bytes that travel between stages, and what they must be to be taken: fp32 or bf16, little-endian."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pier.v1.peer_pb2 import Chunk, Passage
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage

DTYPES = {Passage.DTYPE_FP32: torch.float32, Passage.DTYPE_BF16: torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def pieces(passage: Passage, tensor: Tensor, round: int) -> Iterator[Chunk]:
    """A stream: an empty chunk that names the tensor, then its values. `offset` counts elements."""
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    size, step = tensor.element_size(), CHUNK_BYTES
    yield Chunk(round=round, stage=Chunk.STAGE_PASSAGE, passage=passage)
    for start in range(0, len(flat), step):
        data = flat[start : start + step].tobytes()
        yield Chunk(round=round, stage=Chunk.STAGE_PASSAGE, offset=start // size, data=data)


def passage_of(attempt: bytes, microbatch: int, hop: int, tensor: Tensor) -> Passage:
    """What names a tensor on its way."""
    shape, dtype = [*tensor.shape], CODES[tensor.dtype]
    return Passage(attempt=attempt, microbatch=microbatch, hop=hop, shape=shape, dtype=dtype)


class Arriving:
    """A tensor of which the chunks come in one after the other.

    Raises BadMessage, which says what is wrong with a chunk, or with what all of them are.
    """

    def __init__(self, passage: Passage, shape: Sequence[int], dtype: torch.dtype) -> None:
        if [*passage.shape] != [*shape]:
            raise BadMessage(f"a tensor of shape {[*passage.shape]}, expected {[*shape]}")
        if DTYPES.get(passage.dtype) is not dtype:
            raise BadMessage(f"a tensor of {Passage.Dtype.Name(passage.dtype)}, expected {dtype}")
        self._tensor = torch.empty(*shape, dtype=dtype)
        self._bytes = self._tensor.view(-1).view(torch.uint8).numpy()
        self._size = self._tensor.element_size()
        self._arrived = 0

    def add(self, chunk: Chunk) -> None:
        """The next chunk: whole, in order, once."""
        start, end = self._arrived, self._arrived + len(chunk.data)
        expected = min(CHUNK_BYTES, len(self._bytes) - start)
        if chunk.offset * self._size != start or len(chunk.data) != expected or not expected:
            raise BadMessage(f"a chunk at {chunk.offset} of {len(chunk.data)} bytes, expected {expected} at {start}")
        self._bytes[start:end] = memoryview(chunk.data)
        self._arrived = end

    def whole(self) -> Tensor:
        """The tensor, once all of it is here."""
        if self._arrived < len(self._bytes):
            raise BadMessage(f"a stream that ends after {self._arrived} of {len(self._bytes)} bytes")
        if not bool(torch.isfinite(self._tensor).all()):
            raise BadMessage("a tensor that is not finite")
        return self._tensor
