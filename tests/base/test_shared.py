"""Shared memory that two processes see, that never has a name, and that is reused only when nobody looks at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pier_node.base.shared import SharedVector, attach

LENGTH = 1021
"""Of these tests alone: spares of this length come from here."""


@pytest.fixture(autouse=True)
def _no_spares() -> None:
    SharedVector._spares.clear()


def test_another_process_sees_the_same_memory() -> None:
    vector = SharedVector(LENGTH)
    code = f"from pier_node.base.shared import attach; attach({vector.path!r}, {LENGTH})[7] = 2.5"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert vector.array[7] == 2.5
    assert vector.array.sum() == 2.5


def test_it_has_no_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    vector = SharedVector(LENGTH)
    assert set(Path("/dev/shm").iterdir()) == before
    assert "memfd:pier" in str(Path(vector.path).readlink())


def test_its_memory_outlives_it_where_it_is_mapped() -> None:
    vector = SharedVector(LENGTH)
    mapped = attach(vector.path, LENGTH)
    vector.array[:] = 3
    SharedVector.SPARES, kept = 0, SharedVector.SPARES
    del vector
    SharedVector.SPARES = kept
    assert mapped.sum() == 3 * LENGTH


def test_one_in_a_file_is_reserved_on_the_disk_and_leaves_nothing_there(tmp_path: Path) -> None:
    vector = SharedVector(LENGTH, tmp_path)
    assert Path(vector.path).stat().st_blocks * 512 >= 4 * LENGTH
    assert not vector.array.any()
    code = f"from pier_node.base.shared import attach; attach({vector.path!r}, {LENGTH})[7] = 2.5"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert vector.array.sum() == 2.5
    assert not [*tmp_path.iterdir()]
    path = vector.path
    del vector
    assert SharedVector.scratch(LENGTH).path != path or "memfd:" in str(Path(path).readlink()), "not a spare"


def test_an_empty_one() -> None:
    assert SharedVector(0).array.shape == (0,)


def test_scratch_takes_the_memory_of_one_that_is_gone() -> None:
    vector = SharedVector(LENGTH)
    path = vector.path
    del vector
    assert SharedVector.scratch(LENGTH).path == path


def test_scratch_leaves_alone_what_somebody_still_looks_at() -> None:
    vector = SharedVector(LENGTH)
    view = vector.array[10:20]
    del vector
    SharedVector.scratch(LENGTH).array[:] = 9
    assert not view.any()


def test_scratch_leaves_alone_what_torch_looks_at() -> None:
    torch = pytest.importorskip("torch")
    vector = SharedVector(LENGTH)
    tensor = torch.from_numpy(vector.array)
    del vector
    SharedVector.scratch(LENGTH).array[:] = 9
    assert not tensor.any()


def test_a_new_one_is_zero_although_there_are_spares() -> None:
    vector = SharedVector(LENGTH)
    vector.array[:] = 1
    del vector
    assert not SharedVector(LENGTH).array.any()


def test_spares_are_few() -> None:
    vectors = [SharedVector(LENGTH) for _ in range(SharedVector.SPARES + 4)]
    del vectors[:]
    assert len(SharedVector._spares[LENGTH]) == SharedVector.SPARES


def test_scratch_of_another_length_is_new() -> None:
    del SharedVector(LENGTH).array
    vector = SharedVector.scratch(LENGTH + 1)
    assert vector.array.dtype == np.float32
    assert len(vector.array) == LENGTH + 1
