"""The journal: what this site voted for last, on the disk before the vote leaves it, and its last promise.

A site that restarts in the middle of a round must not contradict a vote that others may have counted, nor vote in a
ballot below one that it has taken part in. Of pairs it keeps what outer/records.py says.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from pier.v1.peer_pb2 import Ballot, Value
from pier_node.durable import Torn, read_sealed, replace, seal
from pier_node.errors import PierError
from pier_node.outer.records import Doubt, Records

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedVote:
    """What was voted: `value`, for `round`, in the ballot (`ballot_number`, `ballot_keeper`)."""

    round: int
    ballot_number: int
    ballot_keeper: str
    value: Value


class Journal:
    """One vote in one file and one promise in another, each replaced by the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._promise = path.with_stem(f"{path.stem}-promise")

    def record(self, round: int, ballot_number: int, ballot_keeper: str, value: Value) -> None:
        """Return once the vote would survive a power cut.

        Raises:
            PierError: it cannot be written; the vote must not be cast then.
        """
        fields = {
            "round": round,
            "ballot_number": ballot_number,
            "ballot_keeper": ballot_keeper,
            "value": MessageToDict(value, preserving_proto_field_name=True),
        }
        _write(self._path, fields, f"vote of round {round}")

    def promise(self, round: int, ballot: Ballot) -> None:
        """Return once it would survive a power cut that this site votes in no lower ballot of this round.

        Raises:
            PierError: it cannot be written; the site must not take part in that ballot then.
        """
        fields = {"round": round, "number": ballot.number, "keeper": ballot.keeper}
        _write(self._promise, fields, f"promise of round {round}")

    def last(self) -> RecordedVote | None:
        """The last vote; None when there is none, or when the file is damaged, which is logged."""
        fields = _read(self._path, "vote")
        return RecordedVote(**{**fields, "value": ParseDict(fields["value"], Value())}) if fields else None

    def promised(self) -> tuple[int, Ballot]:
        """The last promise: its round, 0 when there is none or the file is damaged, which is logged; its ballot."""
        fields = _read(self._promise, "promise")
        return (fields["round"], Ballot(number=fields["number"], keeper=fields["keeper"])) if fields else (0, Ballot())


class PairJournal:
    """Records of pairs in one file, each replaced by the next."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Records:
        """What was kept last; nothing when the file is damaged, which is logged."""
        fields = _read(self._path, "pairs") or {"partners": [], "doubts": []}
        doubts = [
            Doubt(number, node, bytes.fromhex(name), bytes.fromhex(it)) for number, node, name, it in fields["doubts"]
        ]
        return Records(dict(fields["partners"]), {doubt.round: doubt for doubt in doubts})

    def keep(self, records: Records) -> None:
        """Return once they would survive a power cut. Raises PierError: they cannot be written."""
        doubts = [[it.round, it.decider, it.meeting.hex(), it.digest.hex()] for it in records.doubts.values()]
        fields = {"partners": [[number, node] for number, node in records.partners.items()], "doubts": doubts}
        _write(self._path, fields, "records of pairs")


def _write(path: Path, fields: dict[str, Any], what: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, seal(fields))
    except OSError as error:
        problem = f"{path}: cannot write down the {what}: {error.strerror}"
        raise PierError(problem, "Free some space there or give another --data folder.") from error


def _read(path: Path, what: str) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return read_sealed(path)
    except Torn as problem:
        log.warning("%s: %s: the %s it held is forgotten", path, problem, what)
        return None
