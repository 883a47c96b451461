from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from pier_node.base.errors import PierError
from pier_node.experts.sheet import HASH, Sheet, Subject, load_sheet, row_hashes, unpacked

ABOUT = Subject(expert="topics", weights="ab" * 32, domain="network", split="test")
ROWS = np.arange(3 * 9, dtype=np.uint8).reshape(3, 9)


def sheet(log_probs: Any = None) -> Sheet:
    values = -np.arange(24, dtype=np.float32).reshape(3, 8) if log_probs is None else log_probs
    return Sheet(ABOUT, values, row_hashes(ROWS))


def packed(tensors: dict[str, Any], subject: str = "") -> bytes:
    return save(tensors, {"subject": subject or ABOUT.model_dump_json()})


def good() -> dict[str, Any]:
    return {"log_probs": sheet().log_probs, "rows": sheet().rows}


def test_a_sheet_comes_back_as_it_was(tmp_path: Path) -> None:
    path = sheet().save(tmp_path)
    assert path.name == "topics.abababababab.network.test.scores.safetensors"
    back = load_sheet(path)
    assert back.subject == ABOUT
    assert back.log_probs.tobytes() == sheet().log_probs.tobytes()
    assert back.rows.tolist() == sheet().rows.tolist()


def test_what_the_parent_gave_the_rows_comes_along(tmp_path: Path) -> None:
    parent = np.array([-1.0, -2.5, 0.0], dtype=np.float32)
    back = load_sheet(replace(sheet(), parent=parent).save(tmp_path))
    assert back.parent is not None
    assert back.parent.tolist() == parent.tolist()
    assert load_sheet(sheet().save(tmp_path)).parent is None


@pytest.mark.parametrize(
    ("parent", "said"),
    [
        (np.full(2, -1, dtype=np.float32), r"parent is float32 \[2\], not float32 \[3\]"),
        (np.full((3, 1), -1, dtype=np.float32), r"parent is float32 \[3, 1\]"),
        (np.full(3, -1.0), "parent is float64"),
        (np.array([-1, np.nan, -1], dtype=np.float32), "no number"),
        (np.array([-1, 0.5, -1], dtype=np.float32), "above 0"),
    ],
)
def test_what_no_parent_gives_is_refused(parent: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unpacked(packed({**good(), "parent": parent}))


def test_equal_rows_have_equal_hashes_and_others_others() -> None:
    hashes = row_hashes(np.concatenate([ROWS, ROWS[:1]]))
    assert hashes.shape == (4, HASH)
    assert hashes[0].tolist() == hashes[3].tolist()
    assert len({row.tobytes() for row in hashes}) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e-6])
def test_what_is_no_log_probability_is_refused(bad: float) -> None:
    values = sheet().log_probs.copy()
    values[1, 2] = bad
    with pytest.raises(ValueError, match="above 0 or no number"):
        unpacked(packed({**good(), "log_probs": values}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"log_probs": np.zeros((3, 8))}, "float64"),
        ({"log_probs": np.zeros(8, dtype=np.float32)}, r"\[8\]"),
        ({"log_probs": np.zeros((0, 8), dtype=np.float32)}, r"\[0, 8\]"),
        ({"rows": np.zeros((2, HASH), dtype=np.uint8)}, r"rows are uint8 \[2, 16\]"),
        ({"rows": np.zeros((3, HASH), dtype=np.int8)}, "rows are int8"),
        ({"more": np.zeros(1)}, "it has"),
    ],
)
def test_other_shapes_and_kinds_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unpacked(packed({**good(), **changed}))


@pytest.mark.parametrize(
    ("field", "value"), [("expert", "../x"), ("weights", "z" * 64), ("split", "train"), ("domain", ""), ("extra", 1)]
)
def test_what_it_is_about_is_checked(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        unpacked(packed(good(), json.dumps({**ABOUT.model_dump(), field: value})))


def test_without_a_subject_it_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say what it is about"):
        unpacked(save(good()))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 whatever is wrong
        unpacked(data)


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_byte_that_changed_makes_no_number_that_is_none(at: int, byte: int) -> None:
    data = bytearray(sheet().packed())
    data[at % len(data)] = byte
    try:
        back = unpacked(bytes(data))
    except ValueError:
        return
    assert np.isfinite(back.log_probs).all()
    assert (back.log_probs <= 0).all()


def test_a_file_that_is_none_is_said_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nothing")
    for name in ("x", "missing"):
        with pytest.raises(PierError, match=name):
            load_sheet(tmp_path / name)
