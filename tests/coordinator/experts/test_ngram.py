from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pier_coordinator.experts.probing import Sample, bits, probed

TEXT = b"the cat sat on the mat; the rat sat on the cat."


def chance(train: bytes, before: bytes, byte: int, order: int) -> float:
    """The definition, in words of counts."""
    if order < 0:
        return 1 / 256
    context = before[len(before) - order :]
    found = Counter(
        padded[index + order]
        for padded in [bytes(order) + train]
        for index in range(len(train))
        if padded[index : index + order] == context
    )
    shorter = chance(train, before, byte, order - 1)
    total, kinds = sum(found.values()), len(found)
    return (found[byte] + kinds * shorter) / (total + kinds) if total else shorter


def test_it_is_interpolated_as_defined() -> None:
    asked = b"the hat sat"
    found = bits(TEXT, asked, (0, 2))
    for row, order in enumerate((0, 2)):
        expected = [-np.log2(chance(TEXT, bytes(2) + asked[:index], byte, order)) for index, byte in enumerate(asked)]
        assert found[row] == pytest.approx(expected)


def test_chances_are_a_distribution() -> None:
    every = np.array([bits(TEXT, TEXT[:9] + bytes([byte]), (3,))[0, -1] for byte in range(256)])
    assert (2.0**-every).sum() == pytest.approx(1)


def test_more_text_and_more_context_help_where_there_is_order() -> None:
    random = np.random.default_rng(0)
    words = [bytes(random.integers(97, 123, 6).astype(np.uint8)) for _ in range(300)]
    text = b" ".join(words[index] for index in random.integers(0, 300, 6000))
    noise = random.integers(0, 256, 40_000).astype(np.uint8).tobytes()
    probes = probed([Sample(each[:-8192], each[-8192:]) for each in (text, noise)], np.array([1.0, 2.0, 3.0]))
    assert probes.losses.shape == (2, 9, 16)
    assert probes.tokens.tolist() == sorted(probes.tokens.tolist())
    means = probes.losses.mean(axis=-1)
    assert means[0, 0] > means[0, 2], "size"
    assert means[0, 0] > means[0, 6], "tokens"
    assert means[1].min() >= 7.9, "nothing helps with noise"


def test_a_sample_that_is_too_short_is_named() -> None:
    with pytest.raises(ValueError, match="1"):
        probed([Sample(TEXT * 50, TEXT * 50), Sample(TEXT, TEXT)], np.ones(3))
