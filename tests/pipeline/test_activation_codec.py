"""What travels between stages: golden bytes, what a code loses, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outer.codec.samples import KINDS, vector
from pipeline.cases import BATCH, CONTEXT, config, iteration_plan, reference, workers, worths
from simulation.virtual_time import run

from pier_node.base.shared import Vector
from pier_node.pipeline.activation_codec import DTYPES, LARGEST, BadValues, Formats, TensorFormat, pieces
from pier_node.pipeline.iteration_plan import Plan
from pier_node.wire.carrier import CHUNK_BYTES, BadMessage, Chunk
from pier_proto.v1.peer_pb2 import Activation

NAMES = st.sampled_from(sorted(DTYPES))
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2, 7, 16, 64, 96, 128, 192]))
LEVELS = {"int8": 254, "int4": 15}


def tensor(kind: str, shape: Sequence[int]) -> Vector:
    return vector(kind, math.prod(shape)).reshape(shape)


@given(NAMES, SHAPES, st.sampled_from(sorted(KINDS)))
@settings(deadline=None)
def test_a_tensor_comes_back_with_its_shape_finite_and_no_longer(
    name: str, shape: tuple[int, int, int], kind: str
) -> None:
    form, values = TensorFormat(name, shape), tensor(kind, shape)
    if (most := np.abs(values).max()) > LARGEST:
        values *= np.float32(LARGEST / most)
    data = form.encode(values)
    decoded = form.decode(data)
    assert len(data) == form.size
    assert decoded.shape == shape
    assert np.isfinite(decoded).all()
    assert decoded.flags.writeable, "PyTorch warns about others"
    exact = values.astype(np.float64)
    assert np.linalg.norm(exact - decoded) <= np.linalg.norm(exact) * (1 + 1e-6)
    if name == "none":
        assert data == values.astype("<f4").tobytes()
        assert decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_what_no_stage_sends_is_refused(name: str) -> None:
    form = TensorFormat(name, (1, 1, 4))
    for value in (-3 * LARGEST, 1e38):
        data = form.encode(np.full((1, 1, 4), value, np.float32))
        with pytest.raises(BadValues, match="no stage sends more than"):
            form.decode(data)


@given(st.sampled_from(sorted(LEVELS)), SHAPES)
@settings(deadline=None)
def test_a_token_does_not_see_how_large_the_others_are(name: str, shape: tuple[int, int, int]) -> None:
    form, values = TensorFormat(name, shape), tensor("normal", shape)
    size = 10.0 ** np.random.default_rng(2).integers(-6, 6, shape[:2])[..., None]
    error = np.abs(form.decode(form.encode((values * size).astype(np.float32))) - values * size)
    step = (np.abs(values).max(axis=2, keepdims=True) * size) * 2 / LEVELS[name]
    assert (error <= step * 0.55).all()


GOLDEN = {
    "none": "000080bf0000003f00000000000080400000c842000000c20000000000004842",
    "bf16": "80bf003f00008040c84200c200004842",
    "int8": "013d4a3fe010007f7fd7003f",
    "int4": "637d2482f00443af",
}
"""Of two tokens of four values; for int8 and int4 first the scales of both."""


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    form, values = TensorFormat(name, (1, 2, 4)), np.array([[[-1, 0.5, 0, 4], [100, -32, 0, 50]]], np.float32)
    assert form.encode(values).hex() == GOLDEN[name]
    np.testing.assert_allclose(form.decode(bytes.fromhex(GOLDEN[name])), values, atol=100 / 15)


@pytest.mark.parametrize(("name", "size"), [("none", 768), ("bf16", 384), ("int8", 204), ("int4", 108)])
def test_sizes(name: str, size: int) -> None:
    assert TensorFormat(name, (1, 2, 96)).size == size, "groups of 32 divide 96"


NAN, INFINITY = np.float32(np.nan).tobytes(), np.float32(np.inf).tobytes()
BAD = {
    "a value that is not finite": ("none", bytes(12) + NAN),
    "an infinite value": ("none", INFINITY + bytes(12)),
    "an infinite half": ("bf16", b"\x80\x7f" + bytes(6)),
    "an infinite scale": ("int8", b"\x80\x7f" + bytes(4)),
    "a scale that is not a number": ("int8", b"\xc0\x7f" + bytes(4)),
    "a negative scale": ("int8", b"\x80\xbf" + bytes(4)),
    "a scale of which the values would be infinite": ("int8", b"\x7f\x7f" + b"\x7f" * 4),
    "a code that is too large": ("int8", b"\x80\x3f\x80" + bytes(3)),
    "values without a step": ("int4", b"\0\0\x01\0"),
    "an infinite step": ("int4", b"\xff\xff\0\0"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_no_encoder_produces_is_refused(kind: str) -> None:
    name, data = BAD[kind]
    form = TensorFormat(name, (1, 1, 4))
    assert len(data) == form.size
    with pytest.raises(BadMessage):
        form.decode(data)


@given(NAMES, st.binary(max_size=40), st.sampled_from([0, 7]))
def test_noise_is_refused_or_finite(name: str, data: bytes, ids: int) -> None:
    form = TensorFormat(name, (1, 2, 4), ids)
    try:
        assert np.isfinite(form.decode(data)).all()
    except BadMessage:
        return
    assert len(data) == form.size


def test_a_tensor_is_taken_in_whole_chunks_only() -> None:
    form = TensorFormat("int8", (3, 1024, 512))
    data = form.encode(tensor("normal", (3, 1024, 512)))
    first, *rest = pieces(form.activation(bytes(32), 1, 2), data, 7)
    assert first.activation == Activation(
        attempt=bytes(32), microbatch=1, hop=2, shape=[3, 1024, 512], dtype=Activation.DTYPE_INT8
    )
    assert [chunk.offset for chunk in rest] == [0, CHUNK_BYTES]
    arriving = form.arriving(first.activation)
    for chunk in rest:
        with pytest.raises(BadMessage, match="a stream that ends after"):
            arriving.whole()
        with pytest.raises(BadMessage, match="a chunk at"):
            arriving.add(Chunk(offset=chunk.offset + 1, data=chunk.data))
        with pytest.raises(BadMessage, match="a chunk at"):
            arriving.add(Chunk(offset=chunk.offset, data=chunk.data[1:]))
        arriving.add(chunk)
    assert arriving.whole() == data
    with pytest.raises(BadMessage, match="a chunk at"):
        arriving.add(Chunk(offset=len(data)))


def test_a_site_that_computes_in_bf16_sends_that_unless_there_is_a_codec() -> None:
    plain, coded = config(), config(activation_codec="int4", gradient_codec="int8")
    values = BATCH * CONTEXT * 16
    for bf16, width in ((False, 4), (True, 2)):
        assert Formats.of(plain, bf16).activations.size == width * values
        assert Formats.of(coded, bf16).activations.size == values // 2 + values // 16 * 2
        assert Formats.of(coded, bf16).gradients.size == values + values // 16 * 2
    assert Formats.of(plain, False).mean_size == 4 * values


def test_codecs_make_another_run() -> None:
    runs = config(), config(activation_codec="int8"), config(gradient_codec="int8")
    assert len({it.hash() for it in runs}) == 3


WITH_IDS = st.tuples(NAMES, SHAPES, st.sampled_from([1, 2, 300, 2**16, 2**16 + 1, 2**24]))


@given(WITH_IDS, st.randoms(use_true_random=False))
def test_token_ids_arrive_as_they_are_beside_the_coded_channels(
    form: tuple[str, tuple[int, int, int], int], dice: Random
) -> None:
    name, (sequences, time, channels), vocabulary = form
    values = tensor("normal", (sequences, time, channels))
    ids = np.array([[[dice.randrange(vocabulary)] for _ in range(time)] for _ in range(sequences)], np.float32)
    plain, both = TensorFormat(name, values.shape), TensorFormat(name, (sequences, time, channels + 1), vocabulary)
    data = both.encode(np.concatenate([values, ids], axis=2))
    assert len(data) == both.size == plain.size + sequences * time * (2 if vocabulary <= 2**16 else 4)
    decoded = both.decode(data)
    assert np.array_equal(decoded[..., -1:], ids)
    assert np.array_equal(decoded[..., :-1], plain.decode(plain.encode(values)))


def test_a_token_id_outside_of_the_vocabulary_is_refused() -> None:
    form = TensorFormat("int8", (1, 2, 5), ids=300)
    data = form.encode(np.ones((1, 2, 5), np.float32))
    assert form.decode(data)[..., -1].tolist() == [[1, 1]]
    with pytest.raises(BadValues, match="a token id of 300, with 300 tokens in the vocabulary"):
        form.decode(data[:-2] + b"\x2c\x01")


@pytest.mark.parametrize(
    ("codec", "near", "subspace"),
    [("bf16", 0.02, 0), ("int8", 0.03, 0), ("int4", 0.4, 0), ("int8", 0.1, 4)],
)
def test_gradients_are_nearly_those_of_one_process(codec: str, near: float, subspace: int) -> None:
    for gradient, exact in gradients(codec, subspace):
        assert 0 < np.linalg.norm(gradient - exact) < near * np.linalg.norm(exact)


def test_that_only_a_subspace_travels_loses_nothing() -> None:
    for gradient, exact in gradients("none", 4):
        np.testing.assert_allclose(gradient, exact, atol=1e-6 * np.abs(exact).max())


def gradients(codec: str, subspace: int) -> list[tuple[Vector, Vector]]:
    """Of each site's stage: as its attempt ends, and by one process."""
    tables = config(activation_codec=codec, gradient_codec=codec, tied=not subspace, subspace=subspace)
    plan = Plan.read(iteration_plan([0, 0, 1, 1, 2, 3], [[0, 2, 4], [0, 3, 5], [1, 2, 5], [1, 4, 5]]), 4)

    async def main() -> dict[str, Vector]:
        return {node: worth.gradient for node, worth in (await worths(await workers(tables, plan))).items()}

    means, _, _ = reference(tables, plan)
    return [(gradient, means[plan.stages[node]]) for node, gradient in run(main()).items()]
