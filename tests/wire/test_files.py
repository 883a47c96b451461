"""Files that arrive in several transfers: whatever is interrupted, repeated or spoilt, only the whole file is taken."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier_node.wire.files import PIECE, Arriving, pieces_of, size_and_digest

SENDER, OTHER = "a" * 16, "b" * 16


class Broken(Exception):
    pass


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def transfer(content: bytes, offset: int, breaks_after: int | None = None, each: int = 7) -> AsyncIterator[bytes]:
    """What follows the offset, in small pieces; the line may break after some of it."""
    end = len(content) if breaks_after is None else min(len(content), offset + breaks_after)
    for start in range(offset, end, each):
        yield content[start : min(start + each, end)]
    if breaks_after is not None:
        raise Broken


@settings(deadline=None)
@given(content=st.binary(max_size=200), breaks=st.lists(st.integers(0, 60), max_size=8), back=st.integers(0, 9))
def test_a_file_arrives_wherever_its_transfers_break(content: bytes, breaks: list[int], back: int) -> None:
    digest = digest_of(content)

    async def story(folder: Path) -> None:
        for after in breaks:
            _, here = Arriving(folder, SENDER).here()
            offset = max(0, here - back)  # a sender may also go back
            with pytest.raises(Broken):
                await Arriving(folder, SENDER).receive(transfer(content, offset, after), len(content), digest, offset)
            assert Arriving(folder, SENDER).here() == (digest, min(len(content), offset + after))
        _, here = Arriving(folder, SENDER).here()
        path = await Arriving(folder, SENDER).receive(transfer(content, here), len(content), digest, here)
        assert path.read_bytes() == content
        assert os.listdir(folder) == [path.name]

    with TemporaryDirectory() as folder:
        asyncio.run(story(Path(folder)))


@settings(deadline=None)
@given(
    content=st.binary(min_size=1, max_size=100),
    sent=st.binary(max_size=120),
    had=st.integers(0, 100),
    offset=st.integers(0, 130),
)
def test_nothing_but_that_file_is_taken_whatever_is_sent_and_wherever_it_is_said_to_begin(
    content: bytes, sent: bytes, had: int, offset: int
) -> None:
    digest = digest_of(content)

    async def story(arriving: Arriving) -> None:
        with pytest.raises(Broken):
            await arriving.receive(transfer(content, 0, had), len(content), digest, 0)
        had_it = min(had, len(content))
        right = offset <= had_it and content[:offset] + sent == content
        try:
            path = await arriving.receive(transfer(sent, 0), len(content), digest, offset)
        except ValueError:
            assert not right
            assert arriving.here()[1] < len(content), "what is whole and wrong is deleted"
        else:
            assert right
            assert path.read_bytes() == content

    with TemporaryDirectory() as folder:
        asyncio.run(story(Arriving(Path(folder), SENDER)))


async def test_a_part_that_the_disk_has_lost_or_changed_is_deleted_and_the_file_sent_again(tmp_path: Path) -> None:
    content, arriving = bytes(range(100)), Arriving(tmp_path, SENDER)
    with pytest.raises(Broken):
        await arriving.receive(transfer(content, 0, 50), 100, digest_of(content), 0)
    (tmp_path / f"{SENDER}-{digest_of(content)}.part").write_bytes(bytes(50))  # as after a power cut
    with pytest.raises(ValueError, match="its hash is not that of the 100 bytes that came"):
        await arriving.receive(transfer(content, 50), 100, digest_of(content), 50)
    assert arriving.here() == ("", 0)
    path = await arriving.receive(transfer(content, 0), 100, digest_of(content), 0)
    assert path.read_bytes() == content


async def test_another_file_of_the_same_sender_takes_its_place_and_another_sender_s_does_not(tmp_path: Path) -> None:
    one, two = b"one" * 9, b"two" * 9
    for sender, content in ((SENDER, one), (OTHER, one), (SENDER, two)):
        with pytest.raises(Broken):
            await Arriving(tmp_path, sender).receive(transfer(content, 0, 5), 27, digest_of(content), 0)
    assert Arriving(tmp_path, SENDER).here() == (digest_of(two), 5)
    assert Arriving(tmp_path, OTHER).here() == (digest_of(one), 5)
    Arriving(tmp_path, OTHER).drop()
    assert Arriving(tmp_path, OTHER).here() == ("", 0)
    assert Arriving(tmp_path, SENDER).here() == (digest_of(two), 5)


async def test_no_more_is_written_than_was_said(tmp_path: Path) -> None:
    arriving = Arriving(tmp_path, SENDER)
    with pytest.raises(ValueError, match="more than the 10 bytes that it was to have"):
        await arriving.receive(transfer(bytes(1000), 0), 10, digest_of(bytes(10)), 0)
    assert arriving.here() == ("", 0)


@pytest.mark.parametrize("offset", [0, 1, PIECE, 2 * PIECE + 3])
async def test_a_file_is_sent_from_where_it_is_asked_for(tmp_path: Path, offset: int) -> None:
    content = bytes(range(256)) * (2 * PIECE // 256) + b"end"
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        assert await size_and_digest(file) == (len(content), hashlib.sha256(content).digest())
        pieces = [piece async for piece in pieces_of(file, offset)]
    assert b"".join(pieces) == content[offset:]
    assert all(len(piece) <= PIECE for piece in pieces)
