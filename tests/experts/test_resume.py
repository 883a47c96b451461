from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pier_node.experts import resume
from pier_node.experts.resume import FILE, HEADER, Kept, ResumeState, check, most_bytes


def stand(step: int) -> ResumeState:
    first, second, third = (np.arange(5, dtype=np.float32) * factor for factor in (1, 2, 3))
    return ResumeState(step, 10 * step, first, second, third)


def test_the_last_one_is_found_again(tmp_path: Path) -> None:
    stand(3).save(tmp_path, "expert")
    stand(4).save(tmp_path, "expert")
    found = ResumeState.load(tmp_path, "expert", 5)
    assert found is not None
    assert (found.step, found.tokens) == (4, 40)
    for key in ("weights", "adam_m", "adam_v"):
        assert np.array_equal(getattr(found, key), getattr(stand(4), key))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


EARLIER = zlib.decompress(
    base64.b64decode(
        "eNoTYGQAg2ql+Pjc1JLElMSSxPh4JatqpbzE3FQlK6XEJPxQSUepJD87Na8YqNbYAMgrLkktALGVanWUgMblxueCTEspqSwAGedmbARSk5EI"
        "4kWbxuoogW3MT0srTi0BmhFtoGNkEAvTWkaSViMDHROw3vLUzPQMkBAJmk0MdMyAmmsVIAASKgwODAwNQHwAiBkcoUJQvgCQ7wAVa7CHqHUA"
        "qwcAzttcQg=="
    )
)
"""`stand(3)` of the expert abab…, as version 0.1.0 wrote it before it shared code with the state store."""


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(EARLIER)
    found = ResumeState.load(tmp_path, NAME, 5)
    assert found is not None
    assert (found.step, found.tokens) == (3, 30)
    for key in ("weights", "adam_m", "adam_v"):
        assert np.array_equal(getattr(found, key), getattr(stand(3), key))
    check(tmp_path / FILE, 5, 3, NAME)


def test_there_may_be_none(tmp_path: Path) -> None:
    assert ResumeState.load(tmp_path, "expert", 5) is None


@pytest.mark.parametrize(("name", "length"), [("other", 5), ("expert", 6)])
def test_that_of_another_expert_is_not_used(
    tmp_path: Path, name: str, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    stand(3).save(tmp_path, "expert")
    assert ResumeState.load(tmp_path, name, length) is None
    assert "begins again: it is of another expert" in caplog.text


@pytest.mark.parametrize("keep", [0, 7, 100])
def test_a_damaged_one_is_not_used(tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    stand(3).save(tmp_path, "expert")
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:keep])
    assert ResumeState.load(tmp_path, "expert", 5) is None
    assert "cannot be used" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        stand(3).save(tmp_path / "none", "expert")


NAME = "ab" * 16


def written(folder: Path, **changed: Any) -> Path:
    """A checkpoint after step 3, of an expert with five parameters."""
    replace(stand(3), **changed).save(folder, NAME)
    return folder / FILE


@pytest.mark.parametrize("some", [1, 2, 5, 1 << 22])
def test_what_was_sent_whole_is_a_checkpoint(tmp_path: Path, some: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "SOME", some)
    path = written(tmp_path)
    check(path, 5, 3, NAME)
    check(path, 5, 3)
    assert 5 * 12 < path.stat().st_size <= most_bytes(5) == 60 + HEADER


@pytest.mark.parametrize(
    ("length", "step", "name", "said"),
    [
        (6, 3, NAME, r"weights is F32 \[5\], not F32 \[6\]|adam_m is F32 \[5\]"),
        (5, 4, NAME, "not one after step 4"),
        (5, 3, "cd" * 16, "of another expert"),
    ],
)
def test_a_checkpoint_of_something_else_is_none(tmp_path: Path, length: int, step: int, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(written(tmp_path), length, step, name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", resume.TENSORS)
@pytest.mark.parametrize("some", [2, 1 << 22])
def test_values_that_are_no_numbers_are_found_wherever_they_are(
    tmp_path: Path, key: str, value: float, some: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "SOME", some)
    vector = np.ones(5, dtype=np.float32)
    vector[4] = value
    with pytest.raises(ValueError, match=f"{key} has values that no training gives"):
        check(written(tmp_path, **{key: vector}), 5, 3)


def test_a_mean_of_squares_is_not_negative(tmp_path: Path) -> None:
    check(written(tmp_path, adam_m=-np.ones(5, dtype=np.float32)), 5, 3)
    with pytest.raises(ValueError, match="adam_v has values"):
        check(written(tmp_path, adam_v=-np.ones(5, dtype=np.float32)), 5, 3)


def test_other_tensors_other_types_and_more_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    vectors = dict.fromkeys(resume.TENSORS, np.ones(5, dtype=np.float32))
    about = {"name": NAME, "step": "3", "tokens": "30"}
    save_file({**vectors, "more": vectors["weights"]}, path, about)
    with pytest.raises(ValueError, match="more"):
        check(path, 5, 3)
    save_file({**vectors, "adam_m": np.ones(5, dtype=np.float16)}, path, about)
    with pytest.raises(ValueError, match="adam_m is F16"):
        check(path, 5, 3)
    save_file(vectors, path, {**about, "tokens": "-1"})
    with pytest.raises(ValueError, match="not one after"):
        check(path, 5, 3)
    save_file(vectors, path, {**about, "note": "x" * HEADER})
    with pytest.raises(ValueError, match="more than 4156 bytes"):
        check(path, 5, 3)


@given(raw=st.binary(max_size=300))
def test_noise_is_no_checkpoint(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ValueError):  # noqa: PT011 - the library's words
        check(path, 5, 3)


def test_a_larger_one_may_take_longer() -> None:
    small, large = (Kept(job=0, step=1, size=size, digest="0" * 64) for size in (1, 12 * 10**8))
    assert small.deadline == pytest.approx(60.0, abs=0.01)
    assert large.deadline == pytest.approx(60 + 9155, abs=1), "1.2 GB at 128 KiB/s"
