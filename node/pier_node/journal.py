"""The journal: what this site voted for last, on the disk before the vote leaves it.

A site that restarts in the middle of a round must not contradict a vote that others may have counted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import MessageToDict, ParseDict

from pier.v1.peer_pb2 import Value
from pier_node.durable import Torn, read_sealed, replace, seal
from pier_node.errors import PierError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedVote:
    """What was voted: `value`, for `round`, in the ballot (`ballot_number`, `ballot_keeper`)."""

    round: int
    ballot_number: int
    ballot_keeper: str
    value: Value


class Journal:
    """One vote in one file, replaced by the next."""

    def __init__(self, path: Path) -> None:
        self._path = path

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
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, seal(fields))
        except OSError as error:
            problem = f"{self._path}: cannot write down the vote of round {round}: {error.strerror}"
            raise PierError(problem, "Free some space there or give another --data folder.") from error

    def last(self) -> RecordedVote | None:
        """The last vote; None when there is none, or when the file is damaged, which is logged."""
        if not self._path.exists():
            return None
        try:
            fields = read_sealed(self._path)
        except Torn as problem:
            log.warning("%s: %s: the vote it held is forgotten", self._path, problem)
            return None
        return RecordedVote(**{**fields, "value": ParseDict(fields["value"], Value())})
