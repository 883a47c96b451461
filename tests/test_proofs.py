from __future__ import annotations

from pathlib import Path

import pytest
from outer.cases import link

from pier_node import proofs
from pier_node.errors import PierError
from pier_node.proofs import Proofs

LINKS = [link(round, bytes([round]) * 32, bytes([round + 1]) * 32, "abcd"[:round]) for round in (1, 2, 3, 4)]


def test_what_was_added_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "data" / "proofs.json"
    kept = Proofs(path)
    assert kept.after(-1) == []
    kept.add(LINKS[:2])
    kept.add(LINKS[2:])
    assert Proofs(path).after(-1) == LINKS
    assert Proofs(path).after(2) == LINKS[2:]


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_torn_file_is_told_and_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int) -> None:
    path = tmp_path / "proofs.json"
    Proofs(path).add(LINKS[:3])
    path.write_bytes(path.read_bytes()[:keep])
    again = Proofs(path)
    assert again.after(-1) == []
    assert "cannot prove to newcomers what was committed before its next round" in caplog.text
    again.add(LINKS[3:])
    assert Proofs(path).after(-1) == LINKS[3:]


def test_who_needs_more_than_a_page_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Proofs(tmp_path / "proofs.json")
    kept.add(LINKS)
    monkeypatch.setattr(proofs, "PAGE", LINKS[0].ByteSize() + LINKS[1].ByteSize())
    found, round = [], 0
    while page := kept.after(round):
        found.append(len(page))
        round = page[-1].round
    assert (found, round) == ([2, 1, 1], 4)


def test_a_link_larger_than_a_page_is_sent_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Proofs(tmp_path / "proofs.json")
    kept.add(LINKS)
    monkeypatch.setattr(proofs, "PAGE", 1)
    assert kept.after(-1) == LINKS[:1]


def test_what_cannot_be_written_is_an_error_and_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    kept = Proofs(tmp_path / "data" / "proofs.json")
    with pytest.raises(PierError, match="cannot write down the proof of a round: File exists"):
        kept.add(LINKS)
    assert kept.after(-1) == []
