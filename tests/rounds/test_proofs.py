"""The links that a site keeps: after a restart, a crash in the middle of a write, damage, and by the thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from rounds.cases import link

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.rounds import proofs
from pier_node.rounds.proofs import EARLIER_FILE, PROOFS_FILE, Proofs
from pier_proto.v1.peer_pb2 import Link


def step(round: int, members: str) -> Link:
    return link(round, bytes([round]) * 32, bytes([round + 1]) * 32, members)


LINKS = [step(round, "abcd"[:round]) for round in (1, 2, 3, 4)]


def test_what_was_added_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "data" / PROOFS_FILE
    kept = Proofs(path)
    assert kept.after(-1) == []
    kept.add(LINKS[:2])
    kept.add(LINKS[2:])
    for now in (kept, Proofs(path)):
        assert now.after(-1) == LINKS
        assert now.after(2) == LINKS[2:]
        assert now.of(3) == LINKS[2]
        assert (now.first, now.newest, now.of(5)) == (1, 4, None)


def test_all_links_are_kept_and_newcomers_get_those_they_need(tmp_path: Path) -> None:
    links = [step(round, "ab" if round < 6 else "abc") for round in range(1, 10)]
    kept = Proofs(tmp_path / PROOFS_FILE)
    kept.add(links)
    assert [it.round for it in kept.after(-1)] == [1, 6, 8, 9]
    assert [kept.of(it.round) for it in links] == links


def test_a_later_proof_of_a_round_replaces_the_one_that_is_there(tmp_path: Path) -> None:
    kept, other = Proofs(tmp_path / PROOFS_FILE), step(3, "b")
    kept.add(LINKS)
    kept.add([other])
    for now in (kept, Proofs(tmp_path / PROOFS_FILE)):
        assert now.after(-1) == [*LINKS[:2], other]


@settings(max_examples=40, deadline=None)
@given(cut=some.integers(1, 10_000))
def test_a_crash_in_the_middle_of_a_write_costs_that_write_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("crash") / PROOFS_FILE
    Proofs(path).add(LINKS[:2])
    before = path.stat().st_size
    Proofs(path).add(LINKS[2:3])
    written = path.read_bytes()
    path.write_bytes(written[: before + cut % (len(written) - before)])
    again = Proofs(path)
    assert again.after(-1) == LINKS[:2]
    again.add(LINKS[2:])
    assert Proofs(path).after(-1) == LINKS


def test_damage_is_told_and_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / PROOFS_FILE
    Proofs(path).add(LINKS[:3])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = Proofs(path)
    assert again.after(-1) == LINKS[:1]
    assert "cannot prove to newcomers what was committed before its next round" in caplog.text
    again.add(LINKS[3:])
    assert Proofs(path).after(-1) == [LINKS[0], LINKS[3]]


def test_the_older_half_of_a_large_file_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = [step(round, "ab") for round in range(1, 41)]
    monkeypatch.setattr(proofs, "LARGE", 30 * links[0].ByteSize())
    kept = Proofs(tmp_path / PROOFS_FILE)
    for it in links:
        kept.add([it])
    assert kept.of(40) == links[-1]
    assert kept.of(1) == links[0]
    assert kept.of(5) is None
    assert (tmp_path / PROOFS_FILE).stat().st_size < proofs.LARGE
    assert Proofs(tmp_path / PROOFS_FILE).after(-1) == kept.after(-1)


def test_the_file_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    earlier = tmp_path / EARLIER_FILE
    earlier.write_bytes(durable.seal({"links": [it.SerializeToString().hex() for it in LINKS]}))
    assert Proofs(tmp_path / PROOFS_FILE).after(-1) == LINKS
    assert not earlier.exists()
    assert Proofs(tmp_path / PROOFS_FILE).after(-1) == LINKS


def test_who_needs_more_than_a_page_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Proofs(tmp_path / PROOFS_FILE)
    kept.add(LINKS)
    monkeypatch.setattr(proofs, "PAGE", LINKS[0].ByteSize() + LINKS[1].ByteSize())
    found, round = [], 0
    while page := kept.after(round):
        found.append(len(page))
        round = page[-1].round
    assert (found, round) == ([2, 1, 1], 4)


def test_a_link_larger_than_a_page_is_sent_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Proofs(tmp_path / PROOFS_FILE)
    kept.add(LINKS)
    monkeypatch.setattr(proofs, "PAGE", 1)
    assert kept.after(-1) == LINKS[:1]


def test_what_cannot_be_written_is_an_error_and_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    kept = Proofs(tmp_path / "data" / PROOFS_FILE)
    with pytest.raises(PierError, match="cannot write down the proof of a round: File exists"):
        kept.add(LINKS)
    assert kept.after(-1) == []
