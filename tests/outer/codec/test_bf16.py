from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from outer.codec.samples import LARGEST, VECTORS
from rounds.cases import fp32

from pier_node.base.shared import Vector
from pier_node.outer.codec import BadCode
from pier_node.outer.codec.interface import Bf16, Rounded, from_bf16, to_bf16

LARGEST_BF16 = float.fromhex("0x1.fep127")


@given(VECTORS)
def test_rounds_as_torch_does_but_for_saturation(values: Vector) -> None:
    expected = torch.from_numpy(values).bfloat16().float().clamp(-LARGEST_BF16, LARGEST_BF16).numpy()
    assert Bf16().decode(Bf16().encode(values), len(values)).tobytes() == expected.tobytes()


@given(VECTORS)
def test_is_idempotent(values: Vector) -> None:
    data = Bf16().encode(values)
    assert Bf16().encode(Bf16().decode(data, len(values))) == data


@pytest.mark.parametrize(
    ("value", "half"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1 + 2**-8, 0x3F80),  # a tie goes to even: down,
        (1 + 3 * 2**-8, 0x3F82),  # and up
        (1 + 2**-8 + 2**-20, 0x3F81),
        (0.0, 0),
        (-0.0, 0x8000),
        (1e-45, 0),
        (2.0**-126, 0x0080),
        (LARGEST, 0x7F7F),
        (-LARGEST, 0xFF7F),
    ],
)
def test_golden(value: float, half: int) -> None:
    assert to_bf16(fp32(value)).tolist() == [half]
    assert Bf16().encode(fp32(value)) == half.to_bytes(2, "little")


def test_only_what_overflows_is_saturated() -> None:
    assert to_bf16(fp32(LARGEST, 1, -LARGEST, -1)).tolist() == [0x7F7F, 0x3F80, 0xFF7F, 0xBF80]


@pytest.mark.parametrize("half", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_infinities_and_nans_are_refused(half: int) -> None:
    with pytest.raises(BadCode, match="not finite"):
        Bf16().decode(b"\0\0" + half.to_bytes(2, "little"), 2)


def test_every_bf16_is_exact() -> None:
    halves = np.arange(0x7F80, dtype=np.uint16)
    assert (to_bf16(from_bf16(halves)) == halves).all()


def test_values_that_are_kept_rounded() -> None:
    kept = np.zeros(5, np.uint16)
    values = Rounded(kept)
    values[1:4] = fp32(1 + 2**-8, 1 + 3 * 2**-8, -LARGEST)  # ties go to even
    assert kept.tolist() == [0, 0x3F80, 0x3F82, 0xFF7F, 0]
    assert values[:3].tolist() == [0.0, 1.0, 1.015625]
    values[1:3] += fp32(0.25, 1)
    values[3:] = 0.0
    values[5:] = fp32()
    assert values[:].tolist() == [0.0, 1.25, 2.015625, 0.0, 0.0]
    assert len(values) == 5
