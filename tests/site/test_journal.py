from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pier_node.base.durable import seal
from pier_node.base.errors import PierError
from pier_node.gossip.pair_commit import Doubt, Records
from pier_node.rounds.commitments import Cast, Commitments, Given
from pier_node.site.journal import Journal, PairJournal
from pier_proto.v1.peer_pb2 import Ballot, Value

VALUE = Value(origin=Ballot(number=3, leader="b"), digest=bytes(range(32)), members=["a", "b"])
BOUND = Commitments(41, frozenset("ac"), (2**63, "b"), Cast.of(Ballot(number=7, leader="a"), VALUE))


GAVE = Commitments(
    41,
    frozenset(),
    given=(Given("b", frozenset("ac")), Given("c", frozenset("a"))),
    handovers=frozenset({b"signed", b"too"}),
)


def test_what_was_given_away_and_what_proves_it_is_remembered(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.json")
    journal.keep(GAVE)
    assert journal.load(41, "a") == GAVE
    assert journal.load(42, "a") == Commitments.fresh(42, "a")


def test_what_binds_a_site_is_remembered(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "data" / "journal.json")
    assert journal.load(41, "a") == Commitments.fresh(41, "a")
    journal.keep(BOUND)
    assert journal.load(41, "a") == BOUND


@pytest.mark.parametrize(("round", "left"), [(40, BOUND), (41, BOUND), (42, Commitments.fresh(42, "a"))])
def test_a_state_that_was_kept_just_before_a_crash_is_committed(tmp_path: Path, round: int, left: Commitments) -> None:
    journal = Journal(tmp_path / "journal.json")
    journal.keep(BOUND)
    assert journal.load(round, "a") == left


RECORD_AND_DIE = """
import os, signal, sys
from pathlib import Path
from pier_node.site.journal import Journal
from pier_node.rounds.commitments import Commitments
Journal(Path(sys.argv[1])).keep(Commitments(7, frozenset("b")))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    died = subprocess.run([sys.executable, "-c", RECORD_AND_DIE, str(path)], check=False, timeout=60)
    assert died.returncode == -9
    assert Journal(path).load(7, "a") == Commitments(7, frozenset("b"))


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_who_has_a_torn_journal_takes_the_coming_round_from_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int
) -> None:
    path = tmp_path / "journal.json"
    Journal(path).keep(BOUND)
    path.write_bytes(path.read_bytes()[:keep])
    assert Journal(path).load(41, "a") == Commitments.fresh(42, "a")
    assert "cannot know what it voted for in round 42" in caplog.text


def test_a_changed_journal_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    Journal(path).keep(BOUND)
    path.write_text(path.read_text().replace("41", "40"))
    assert Journal(path).load(41, "a").committed == 42


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(PierError, match=r"cannot write down the commitments after round 41 in .*: File exists"):
        Journal(tmp_path / "data" / "journal.json").keep(BOUND)


def old_files(folder: Path, vote: int, promise: int, hand: int | None = None) -> None:
    value = {"origin": {"number": 3, "keeper": "b"}, "digest": "AAEC", "members": ["a", "b"]}
    cast = {"round": vote, "ballot_number": 6, "ballot_keeper": "b", "value": value}
    (folder / "journal.json").write_bytes(seal(cast))
    (folder / "journal-promise.json").write_bytes(seal({"round": promise, "number": 7, "keeper": "b"}))
    if hand is not None:
        (folder / "votes.json").write_bytes(seal({"round": hand, "votes": []}))


@pytest.mark.parametrize(
    ("files", "committed", "votes", "promised", "voted"),
    [
        ((41, 41), 41, "a", (0, ""), False),
        ((42, 42), 41, "a", (7, "b"), True),
        ((41, 42), 41, "a", (7, "b"), False),
        ((43, 43), 42, "a", (7, "b"), True),
        ((41, 41, 41), 41, "", (0, ""), False),
        ((41, 41, 44), 44, "", (0, ""), False),
        ((41, 41, 40), 41, "a", (0, ""), False),
    ],
)
def test_the_files_of_earlier_versions_bind_too(
    tmp_path: Path, files: tuple[int, ...], committed: int, votes: str, promised: tuple[int, str], voted: bool
) -> None:
    old_files(tmp_path, *files)
    found = Journal(tmp_path / "journal.json").load(41, "a")
    assert (found.committed, found.votes, found.promised) == (committed, frozenset(votes), promised)
    assert (found.vote is not None) is voted
    Journal(tmp_path / "journal.json").keep(found)
    assert json.loads((tmp_path / "journal.json").read_text())["committed"] == committed
    assert Journal(tmp_path / "journal.json").load(41, "a") == found


def test_pairs_come_back_as_they_were_kept(tmp_path: Path) -> None:
    journal = PairJournal(tmp_path / "run" / "pairs.json")
    assert journal.load() == Records()
    records = Records({3: "a" * 16}).voted(Doubt(4, "b" * 16, b"m" * 32, b"d" * 32))
    journal.keep(records)
    assert PairJournal(tmp_path / "run" / "pairs.json").load() == records
    journal.keep(records.took(4, "b" * 16))
    assert journal.load() == Records({3: "a" * 16, 4: "b" * 16})


def test_damaged_records_of_pairs_are_forgotten_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pairs.json"
    PairJournal(path).keep(Records({3: "a" * 16}))
    path.write_text(path.read_text().replace("aaaa", "bbbb", 1))
    assert PairJournal(path).load() == Records()
    assert "what it held is forgotten" in caplog.text


def test_records_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PierError, match="cannot write down the records of pairs"):
        PairJournal(tmp_path / "file" / "pairs.json").keep(Records())
