"""Shared memory that two processes see, that never has a name, and that is reused only when nobody looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.base import shared
from pier_node.base.shared import Memory, Pool, SharedVector, attach

LENGTH = 1021


@pytest.fixture(autouse=True)
def own_pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Spares come from the test alone."""
    pool = Pool()
    monkeypatch.setattr(shared, "pool", pool)
    return pool


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


def test_its_memory_outlives_it_where_it_is_mapped(own_pool: Pool) -> None:
    vector = SharedVector(LENGTH)
    seen = attach(vector.path, LENGTH)
    vector.array[:] = 3
    own_pool.spares = 0
    del vector
    assert seen.sum() == 3 * LENGTH


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


def mapped() -> int:
    """How many vectors of this process have memory."""
    return Path("/proc/self/maps").read_text().count("memfd:pier")


def test_spares_are_few(own_pool: Pool) -> None:
    before = mapped()
    vectors = [SharedVector(LENGTH) for _ in range(own_pool.spares + 4)]
    del vectors[:]
    assert mapped() - before == own_pool.spares


def test_fragments_of_about_one_length_take_each_others_memory() -> None:
    vector = SharedVector(LENGTH)
    path = vector.path
    del vector
    smaller = SharedVector.scratch(LENGTH - 21)
    assert (smaller.path, len(smaller.array)) == (path, LENGTH - 21)
    view = smaller.array[5:9]
    view[:] = 4
    del smaller
    SharedVector.scratch(LENGTH).array[:] = 9
    assert (view == 4).all(), "somebody looks at it"


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch, own_pool: Pool) -> SimpleQueue[tuple[str, int]]:
    """Vectors are large and none is kept. For each that is freed: the thread, and how many have memory after it."""
    monkeypatch.setattr(shared, "LARGE", LENGTH)
    own_pool.spares = 0
    free, seen = Memory.free, SimpleQueue[tuple[str, int]]()

    def watched(memory: Memory) -> None:
        free(memory)
        seen.put((threading.current_thread().name, mapped()))

    monkeypatch.setattr(Memory, "free", watched)
    return seen


def test_large_memory_is_freed_in_a_thread(freed: SimpleQueue[tuple[str, int]]) -> None:
    before = mapped()
    vectors = [SharedVector(LENGTH) for _ in range(3)]
    del vectors[:]
    assert [freed.get(timeout=60)[0] for _ in range(3)] == ["pier-memory"] * 3
    assert mapped() == before
    small = SharedVector(LENGTH - 1)
    del small
    assert freed.get_nowait()[0] == threading.current_thread().name


def test_no_other_thread_unmaps_large_memory(freed: SimpleQueue[tuple[str, int]]) -> None:
    """The thread that frees it has the last reference, however early it runs."""
    before = mapped()
    for _ in range(300):
        vector = SharedVector(LENGTH)
        del vector
        assert freed.get(timeout=60) == ("pier-memory", before)


def test_large_memory_in_a_file_is_freed_in_a_thread(freed: SimpleQueue[tuple[str, int]], tmp_path: Path) -> None:
    vector = SharedVector(LENGTH, tmp_path)
    del vector
    assert freed.get(timeout=60)[0] == "pier-memory"


def test_spares_that_are_too_many_are_freed_in_a_thread(freed: SimpleQueue[tuple[str, int]], own_pool: Pool) -> None:
    own_pool.spares = 1
    vector = SharedVector(LENGTH)
    del vector
    other = SharedVector(2 * LENGTH)
    assert freed.get(timeout=60)[0] == "pier-memory"
    assert own_pool.kept == 0
    del other
    own_pool.clear()
    assert freed.get(timeout=60)[0] == "pier-memory"


FORKED = f"""
import os
from pathlib import Path
from pier_node.base import shared

shared.LARGE, shared.pool.spares = {LENGTH}, 0
vectors = [shared.SharedVector({LENGTH}) for _ in range(3)]
child = os.fork()
del vectors[:]
if not child:
    assert "memfd:pier" not in Path("/proc/self/maps").read_text(), "freed at once"
    for _ in range(9):
        shared.SharedVector({LENGTH})
elif os.waitpid(child, 0)[1]:
    raise SystemExit("the child failed")
"""


def test_large_memory_after_a_fork_and_at_the_end_of_a_process() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("length", [LENGTH + 1, LENGTH // 2, 0])
def test_scratch_of_another_length_is_new(length: int) -> None:
    vector = SharedVector(LENGTH)
    path = vector.path
    del vector
    assert SharedVector.scratch(length).path != path
    assert len(SharedVector.scratch(length).array) == length


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([8, 10, 100, 104, 1000]), st.integers(0, 9)), max_size=60))
def test_no_more_is_kept_than_was_in_use_at_once(changes: list[tuple[bool, int, int]]) -> None:
    live, most = list[SharedVector](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "pool", Pool())
        for comes, length, which in changes:
            if comes:
                live.append(SharedVector.scratch(length))
            elif live:
                del live[which % len(live)]
            most = max(most, sum(map(held, live)))
            assert shared.pool.kept + sum(map(held, live)) <= most
        live.clear()
        shared.pool.clear()


def held(vector: SharedVector) -> int:
    """Length of the memory of a vector, which may be a little more than its own."""
    return os.stat(vector.path).st_size // 4
