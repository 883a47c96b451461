from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pier.v1.peer_pb2 import Ballot, Value
from pier_node.errors import PierError
from pier_node.journal import Journal, PairJournal, RecordedVote
from pier_node.outer.records import Doubt, Records

VALUE = Value(origin=Ballot(number=3, keeper="b"), digest=bytes(range(32)), members=["a", "b"])


def test_a_vote_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "data" / "vote.json"
    assert Journal(path).last() is None
    Journal(path).record(42, 2**63, "b", VALUE)
    assert Journal(path).last() == RecordedVote(42, 2**63, "b", VALUE)


def test_the_last_vote_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "vote.json")
    for number in (1, 2):
        journal.record(42, number, "b", Value(origin=Ballot(number=number)))
    assert journal.last() == RecordedVote(42, 2, "b", Value(origin=Ballot(number=2)))


RECORD_AND_DIE = """
import os, signal, sys
from pathlib import Path
from pier.v1.peer_pb2 import Value
from pier_node.journal import Journal
Journal(Path(sys.argv[1])).record(7, 1, "a", Value(digest=b"x"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_vote_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "vote.json"
    died = subprocess.run([sys.executable, "-c", RECORD_AND_DIE, str(path)], check=False, timeout=60)
    assert died.returncode == -9
    assert Journal(path).last() == RecordedVote(7, 1, "a", Value(digest=b"x"))


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_torn_record_is_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: int) -> None:
    path = tmp_path / "vote.json"
    Journal(path).record(42, 1, "b", VALUE)
    path.write_bytes(path.read_bytes()[:keep])
    assert Journal(path).last() is None
    assert "vote.json" in caplog.text
    assert "forgotten" in caplog.text


def test_a_changed_record_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "vote.json"
    Journal(path).record(42, 1, "b", VALUE)
    path.write_text(path.read_text().replace("42", "43"))
    assert Journal(path).last() is None


def test_a_vote_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(PierError, match="cannot write down the vote of round 42: File exists"):
        Journal(tmp_path / "data" / "vote.json").record(42, 1, "b", VALUE)


def test_a_promise_is_remembered_beside_the_vote(tmp_path: Path) -> None:
    path = tmp_path / "data" / "vote.json"
    assert Journal(path).promised() == (0, Ballot())
    Journal(path).promise(42, Ballot(number=7, keeper="b"))
    Journal(path).record(42, 6, "a", VALUE)
    assert Journal(path).promised() == (42, Ballot(number=7, keeper="b"))
    assert Journal(path).last() == RecordedVote(42, 6, "a", VALUE)


def test_a_torn_promise_is_no_promise_and_leaves_the_vote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "vote.json")
    journal.record(42, 6, "a", VALUE)
    journal.promise(42, Ballot(number=7, keeper="b"))
    (tmp_path / "vote-promise.json").write_text("{")
    assert journal.promised() == (0, Ballot())
    assert "the promise it held is forgotten" in caplog.text
    assert journal.last()


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
    assert "the pairs it held is forgotten" in caplog.text


def test_records_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PierError, match="cannot write down the records of pairs"):
        PairJournal(tmp_path / "file" / "pairs.json").keep(Records())
