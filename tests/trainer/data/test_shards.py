from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.base.durable import Torn
from pier_node.base.errors import PierError
from pier_node.trainer.data.shards import (
    BLOCK,
    BLOCKS,
    HEADER,
    LLM_C,
    MANIFEST,
    ShardWriter,
    Stream,
    TokenFile,
    TokenManifest,
    TokenShard,
    TokenWriter,
    count,
    fingerprint,
    foreign,
    opened,
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "some.npy"


@settings(deadline=None)
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


EMPTY = TokenManifest(key="k", tokenizer="t", vocab_size=300, separator=None)

lists = st.lists(st.lists(st.integers(0, 299), max_size=6), max_size=6)


@settings(deadline=None)
@given(st.data(), lists)
def test_a_stream_is_its_arrays_joined(data: st.DataObject, parts: list[list[int]]) -> None:
    stream, joined = Stream([np.array(part, np.uint16) for part in parts]), list(chain(*parts))
    assert len(stream) == len(joined)
    assert np.asarray(stream).tolist() == joined
    length = data.draw(st.integers(0, len(joined)))
    starts = data.draw(st.lists(st.integers(0, len(joined) - length), max_size=5)) if length else []
    found = stream.windows(np.array(starts, np.int64), length)
    assert found.tolist() == [joined[start : start + length] for start in starts]


@settings(deadline=None, max_examples=50)
@given(st.data(), lists)
def test_what_is_committed_is_read_from_any_place_to_any_place(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, parts: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, EMPTY)
    for number, part in enumerate(parts, 1):
        writer.append("train", np.array(part, np.uint16))
        writer.append("validation", np.array(part[:1], np.uint16))
        if data.draw(st.booleans()):
            writer.commit(number, 10 * number)
    writer.commit(len(parts), 10 * len(parts), complete=True)
    manifest, joined = TokenManifest.load(folder), list(chain(*parts))
    assert manifest == writer.manifest
    assert (manifest.documents, manifest.complete) == (len(parts), True)
    manifest.check(folder)
    files = manifest.files(folder, "train")
    assert count(files) == len(joined)
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, len(joined))] * 2)))
    assert np.asarray(opened(files, first, end)).tolist() == joined[first:end]
    held_out = manifest.files(folder, "validation")
    assert np.asarray(opened(held_out, 0, count(held_out))).tolist() == [part[0] for part in parts if part]


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=1, max_size=8), st.integers(0, 10_000))
def test_a_changed_manifest_is_torn(tmp_path_factory: pytest.TempPathFactory, bytes_: bytes, place: int) -> None:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, EMPTY)
    writer.append("train", np.arange(10, dtype=np.uint16))
    writer.commit(1, 1)
    path = folder / MANIFEST
    before = path.read_bytes()
    place %= len(before)
    after = before[:place] + bytes_ + before[place + len(bytes_) :]
    path.write_bytes(after)
    try:
        assert TokenManifest.load(folder) == writer.manifest
        assert json.loads(after) == json.loads(before), "only white space may change"
    except Torn:
        assert after != before


def test_a_manifest_of_nonsense_is_torn(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"train": 3}')
    with pytest.raises(Torn, match="checksum"):
        TokenManifest.load(tmp_path)
    with pytest.raises(ValueError, match="pattern"):
        TokenShard(name="../../etc/passwd", tokens=1, check="")


def test_only_files_with_the_wanted_tokens_are_opened(tmp_path: Path) -> None:
    files = [TokenFile(tmp_path / f"{number}.npy", 10) for number in range(3)]
    np.save(files[1].path, np.arange(10, dtype=np.uint16))
    assert np.asarray(opened(files, 12, 20)).tolist() == list(range(2, 10))
    with pytest.raises(PierError, match=r"2\.npy: No such file") as caught:
        opened(files, 12, 21)
    assert "Copy this shard here" in caught.value.remedy
    np.save(files[2].path, np.arange(9, dtype=np.uint16))
    with pytest.raises(PierError, match="has 9 tokens; its manifest says 10"):
        opened(files, 12, 21)


def test_tokens_of_other_programs_are_read(tmp_path: Path) -> None:
    ids = np.arange(1000, 3000, dtype=np.uint16)
    header = np.zeros(HEADER // 4, "<i4")
    (tmp_path / "nano.bin").write_bytes(ids.tobytes())
    for (magic, version), kind in LLM_C.items():
        header[:3] = magic, version, len(ids)
        (tmp_path / f"llmc{version}.bin").write_bytes(header.tobytes() + ids.astype(kind).tobytes())
    np.save(tmp_path / "own.npy", ids.astype(np.int32))
    for name in ("nano.bin", "llmc1.bin", "llmc7.bin", "own.npy"):
        file = foreign(tmp_path / name)
        assert file.tokens == len(ids)
        assert (file.open() == ids).all()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.bin", b"odd", "3 bytes are not a list of uint16"),
        ("a.bin", b"", "0 bytes are not"),
        ("a.npy", np.zeros((2, 2), np.uint8), "shape \\(2, 2\\), is not a list of token ids"),
        ("a.npy", np.zeros(2), "an array of float64"),
        ("a.npy", b"no array", "a.npy"),
        ("a.npy", b"", "No data left in file"),
    ],
)
def test_what_is_not_tokens_is_refused(tmp_path: Path, name: str, content: Any, words: str) -> None:
    path = tmp_path / name
    np.save(path, content) if isinstance(content, np.ndarray) else path.write_bytes(content)
    with pytest.raises(PierError, match=words):
        foreign(path)
