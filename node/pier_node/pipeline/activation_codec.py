"""How activations, and their gradients, travel from one stage to the next: coded, in chunks, and checked on arrival.

The codes are those of outer/codec: fp32, bf16, int8 or int4, rounded to nearest. Values that share a scale are of one
token, because tokens differ in magnitude more than the parts of one do: a group is as long as the codec's blocks, or as
the largest power of two that divides the model's width, if that is less. What is dropped is lost, while outer
rounds send it later: no two microbatches are alike.

If the model's blocks write to a subspace of the residual stream, only its channels travel, and the token ids, from
which the others follow: nothing is lost (Protocol Models, arXiv 2506.01260; its subspace may lie in any direction, this
one is that of the first channels, which is the same up to a rotation). The ids are the last channel of a tensor.

A stream is an empty chunk that identifies the tensor, then its code; `offset` counts bytes of the code. The receiver
knows shape, code and size from the run's configuration, and refuses every other tensor before it allocates any memory.
No value is larger than LARGEST. The next site computes squares and products: of finite values near the end of fp32
they are infinite, and its training would seem to have diverged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from pier_node.base.shared import Buffer, Vector
from pier_node.config.run import RunConfig
from pier_node.outer.codec import CODECS, BadCode, Codec
from pier_node.outer.codec.blockwise import INT4_BLOCK, INT8_BLOCK, Int4, Int8
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage, Chunk
from pier_proto.v1.peer_pb2 import Activation

DTYPES = {
    "none": Activation.DTYPE_FP32,
    "bf16": Activation.DTYPE_BF16,
    "int8": Activation.DTYPE_INT8,
    "int4": Activation.DTYPE_INT4,
}


LARGEST = 1e8
"""Largest magnitude of what a stage sends: far more than a model needs, and 1e8 squares of 1e8 are finite together."""
ROUNDED = 2.0
"""How much larger a value may be when it is decoded."""


class BadValues(BadMessage):
    """A tensor in the expected form has values that no stage sends."""


class TensorFormat:
    """The form of all tensors of one kind in transit.

    Args:
        name: of the codec, from DTYPES.
        shape: [sequences, time, channels].
        ids: size of the vocabulary, if the last channel has token ids; 0: it has none.

    Attributes:
        size: bytes of a coded tensor.
    """

    def __init__(self, name: str, shape: Sequence[int], ids: int = 0) -> None:
        self._shape, self._dtype, self._ids = [*shape], DTYPES[name], ids
        *places, channels = shape
        self._coded = [*places, channels - 1 if ids else channels]
        self._length, self._codec = math.prod(self._coded), _codec(name, self._coded[-1])
        self._id = np.dtype("<u2" if ids <= 2**16 else "<u4")
        self._code_size = self._codec.size(self._length)
        self.size = self._code_size + (self._id.itemsize * math.prod(places) if ids else 0)

    def encode(self, values: Vector) -> bytes:
        """Encode finite values, shape [sequences, time, channels]."""
        if not self._ids:
            return bytes(self._codec.encode(values.reshape(-1)))  # it outlives the tensor, of which it may be a view
        return bytes(self._codec.encode(values[..., :-1].ravel())) + values[..., -1].astype(self._id).tobytes()

    def decode(self, data: bytes) -> Vector:
        """Decode a tensor, shape [sequences, time, channels]. Raises BadValues: no stage sends this."""
        if not self._ids:
            return self._values(data)
        if len(data) != self.size:
            raise BadValues(f"{len(data)} bytes, expected {self.size}")
        values = self._values(data[: self._code_size])
        ids = np.frombuffer(data, self._id, offset=self._code_size).reshape(*self._coded[:-1], 1)
        if int(ids.max()) >= self._ids:
            raise BadValues(f"a token id of {ids.max()}, with {self._ids} tokens in the vocabulary")
        return np.concatenate([values, ids.astype(np.float32)], axis=-1)

    def _values(self, code: bytes) -> Vector:
        try:
            values = self._codec.decode(code, self._length)
        except BadCode as error:
            raise BadValues(f"a tensor that is not finite, or no code: {error}") from error
        low, high = float(values.min()), float(values.max())
        if not math.isfinite(high - low):
            raise BadValues("a tensor that is not finite")
        if max(-low, high) > ROUNDED * LARGEST:
            raise BadValues(f"a tensor with values from {low:.3g} to {high:.3g}: no stage sends more than {LARGEST:g}")
        if not self._codec.lossy:
            values = values.copy()  # it is a read-only view, which PyTorch warns about
        return values.reshape(self._coded)

    def activation(self, attempt: bytes, microbatch: int, hop: int) -> Activation:
        """What identifies a tensor of this form in transit."""
        return Activation(attempt=attempt, microbatch=microbatch, hop=hop, shape=self._shape, dtype=self._dtype)

    def arriving(self, activation: Activation) -> Arriving:
        """A place for a tensor that is announced. Raises BadMessage: it has another form."""
        if [*activation.shape] != self._shape:
            raise BadMessage(f"a tensor of shape {[*activation.shape]}, expected {self._shape}")
        if activation.dtype != self._dtype:
            names = (Activation.Dtype.Name(it) for it in (activation.dtype, self._dtype))
            raise BadMessage(
                "a tensor of {}, expected {}: have all sites one version of Pier and one precision?".format(*names)
            )
        return Arriving(self.size)


def _codec(name: str, dim: int) -> Codec:
    if name == "int8":
        return Int8(block=math.gcd(dim, INT8_BLOCK))
    return Int4(block=math.gcd(dim, INT4_BLOCK)) if name == "int4" else CODECS[name]


class Arriving:
    """A code whose chunks arrive one after the other.

    Raises BadMessage, which says what is wrong with a chunk or with the whole code.
    """

    def __init__(self, size: int) -> None:
        self._size, self._arrived = size, 0
        self._parts: list[Buffer] = []

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk. Chunks must be complete, in order and without repeats."""
        start, expected = self._arrived, min(CHUNK_BYTES, self._size - self._arrived)
        if chunk.offset != start or len(chunk.data) != expected or not expected:
            raise BadMessage(f"a chunk at {chunk.offset} of {len(chunk.data)} bytes, expected {expected} at {start}")
        self._parts.append(chunk.data)
        self._arrived += expected

    def whole(self) -> bytes:
        """The complete code."""
        if self._arrived < self._size:
            raise BadMessage(f"a stream that ends after {self._arrived} of {self._size} bytes")
        return b"".join(self._parts)


def pieces(activation: Activation, data: bytes, round: int) -> Iterator[Chunk]:
    """Split a code into a stream."""
    yield Chunk(round=round, stage=Chunk.STAGE_ACTIVATION, activation=activation)
    for start in range(0, len(data), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        yield Chunk(round=round, stage=Chunk.STAGE_ACTIVATION, offset=start, data=part)


@dataclass(frozen=True)
class Formats:
    """The forms of what goes forward and of what comes back."""

    activations: TensorFormat
    gradients: TensorFormat

    @classmethod
    def of(cls, config: RunConfig, bf16: bool) -> Self:
        """The forms in a run at a site that computes in bf16 or fp32; without a codec tensors travel as computed."""
        section, model, places = config.pipeline, config.model, (config.inner.batch_size, config.model.context)
        names = section.activation_codec, section.gradient_codec
        forward, back = ("bf16" if bf16 and name == "none" else name for name in names)
        if model.subspace:
            activations = TensorFormat(forward, (*places, model.subspace + 1), ids=model.vocab_size)
        else:
            activations = TensorFormat(forward, (*places, model.dim))
        return cls(activations, TensorFormat(back, (*places, model.written)))

    @property
    def mean_size(self) -> float:
        """Mean bytes of a tensor: as many go forward as come back."""
        return (self.activations.size + self.gradients.size) / 2
