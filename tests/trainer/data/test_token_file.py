from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier_node.trainer.data.corpus import BLOCK, BLOCKS, TokenWriter, fingerprint


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "some.npy"


@given(st.lists(st.lists(st.integers(0, 255))), st.sampled_from([np.uint8, np.uint16, np.uint32]))
def test_what_is_appended_is_read(scratch: Path, parts: list[list[int]], kind: type[np.unsignedinteger]) -> None:
    writer = TokenWriter(scratch, np.dtype(kind))
    for part in parts:
        writer.append(np.array(part, dtype=np.uint32))
    writer.close()
    tokens = np.load(scratch, mmap_mode="r")
    assert tokens.dtype == kind
    assert tokens.tolist() == list(chain(*parts))


def test_the_header_leaves_room_for_any_length(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "some.npy", np.dtype(np.uint8))
    empty = writer._file.tell()
    writer.length = 10**15
    writer.close()
    assert (tmp_path / "some.npy").stat().st_size == empty


def test_a_fingerprint_tells_any_change_in_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "some"
    prints = set()
    for data in (b"", b"a", b"b", b"ab", b"ba", b"ab" * BLOCK, b"ab" * BLOCK + b"a", b"ab" * (BLOCK - 1) + b"aa"):
        path.write_bytes(data)
        prints.add(fingerprint(path))
    assert len(prints) == 8


def test_a_fingerprint_looks_at_a_whole_file_of_16_mib_and_at_both_ends_of_a_larger_one(tmp_path: Path) -> None:
    path = tmp_path / "some"
    for size in (BLOCK * BLOCKS, 3 * BLOCK * BLOCKS + 5):
        places = [0, BLOCK, size // 2, size - 1] if size == BLOCK * BLOCKS else [0, BLOCK - 1, size - 1]
        with path.open("wb") as file:
            file.truncate(size)
        prints = {fingerprint(path)}
        for place in places:
            with path.open("r+b") as file:
                file.seek(place)
                file.write(b"x")
            prints.add(fingerprint(path))
        assert len(prints) == 1 + len(places), f"of {size} bytes"
