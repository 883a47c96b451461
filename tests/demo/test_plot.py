from __future__ import annotations

import struct
from pathlib import Path

import pytest
from demo.seen import record
from hypothesis import given
from hypothesis import strategies as st

from pier_node.demo.report import draw, smoothed


def test_golden_smoothing() -> None:
    # 4, then (0.85 · 0.15 · 4 + 0.15 · 2) / (0.85 · 0.15 + 0.15)
    smooth = smoothed([(0, 4.0), (5, 2.0)])
    assert [step for step, _ in smooth] == [0, 5]
    assert [loss for _, loss in smooth] == pytest.approx([4.0, 0.81 / 0.2775])


@given(st.lists(st.floats(-100, 100), min_size=1))
def test_smoothing_stays_among_the_values(values: list[float]) -> None:
    smooth = [value for _, value in smoothed(list(enumerate(values)))]
    assert len(smooth) == len(values)
    assert min(values) - 1e-9 <= min(smooth)
    assert max(smooth) <= max(values) + 1e-9


def test_a_picture_is_written(tmp_path: Path) -> None:
    seen = record(tmp_path, rounds=10)
    seen.tracks["gamma"].loss.clear()
    draw(seen, tmp_path / "loss.png")
    head = (tmp_path / "loss.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1080, 600)
