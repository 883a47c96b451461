"""The journal: what binds a site across a crash (rounds/commitments.py), in one file that is replaced as a whole.

Promise, vote, the votes that the site holds and the last committed round are written together, so none of them can be
restored without the others. The journal of a run of pairs stores the records of gossip/pair_commit.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict

from pier_node.base.durable import Torn, read_sealed, replace, seal, unwritable
from pier_node.gossip.pair_commit import Doubt, Records
from pier_node.rounds.commitments import BallotName, Cast, Commitments, Given
from pier_proto.v1.peer_pb2 import Ballot, Signed, Value

log = logging.getLogger(__name__)


class Journal:
    """The Commitments of one site in one file. Each write replaces the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, round: int, node: str) -> Commitments:
        """What binds the site `node`, whose disk holds the state of `round`.

        A damaged journal may have held a vote that others rely on. In that case the site takes the result of the next
        round from the other members.
        """
        if not self._path.exists():
            return Commitments.fresh(round, node)
        fields = _read(self._path)
        if fields is None:
            log.error(
                "this site cannot know what it voted for in round %d: it decides nothing until others have committed "
                "that round. If it is certain that no other site has, stop all sites and remove %s",
                *(round + 1, self._path),
            )
            forgotten = Commitments.fresh(round + 1, node)
            self.keep(forgotten)
            return forgotten
        if "committed" not in fields:
            fields = self._of_old_files(fields, round, node)
        return _commitments(fields).settled(round, node)

    def keep(self, commitments: Commitments) -> None:
        """Return once they would survive a power cut. Raises PierError: they cannot be written, so must not count."""
        _write(self._path, _fields(commitments), f"commitments after round {commitments.committed}")

    def _of_old_files(self, vote: dict[str, Any], round: int, node: str) -> dict[str, Any]:
        """Convert the three files of earlier versions: the vote, the promise, and the votes that this site holds."""
        folder = self._path.parent
        promise = _read(folder / "journal-promise.json") or {"round": 0, "number": 0, "keeper": ""}
        hand = _read(folder / "votes.json") or {"round": round, "votes": [node]}
        committed = max(round, vote["round"] - 1, promise["round"] - 1, hand["round"])
        found = _fields(Commitments.fresh(committed, node))
        if hand["round"] == committed:
            found["votes"] = hand["votes"]
        if promise["round"] == committed + 1:
            found["promised"] = promise["number"], promise["keeper"]
        if vote["round"] == committed + 1:
            ballot = vote["ballot_number"], vote["ballot_keeper"]
            found["vote"] = _vote_fields(
                Cast.of(Ballot(number=ballot[0], leader=ballot[1]), ParseDict(vote["value"], Value()))
            )
            found["promised"] = max(found["promised"], ballot)
        return found


def _vote_fields(it: Cast) -> dict[str, Any]:
    return {"ballot": it.ballot, "origin": it.origin, "digest": it.digest.hex(), "members": it.members}


def _fields(bound: Commitments) -> dict[str, Any]:
    return {
        "committed": bound.committed,
        "votes": sorted(bound.votes),
        "gifts": [(it.heir, sorted(it.votes)) for it in bound.given],
        "handovers": sorted(each.hex() for each in bound.handovers),
        "promised": bound.promised,
        "vote": _vote_fields(bound.vote) if bound.vote else None,
    }


def _commitments(fields: dict[str, Any]) -> Commitments:
    vote = None
    if it := fields["vote"]:
        vote = Cast(_ballot(it["ballot"]), _ballot(it["origin"]), bytes.fromhex(it["digest"]), tuple(it["members"]))
    given = tuple(Given(heir, frozenset(votes)) for heir, votes in fields["gifts"])
    handovers = frozenset(map(bytes.fromhex, fields["handovers"]))
    votes, promised = frozenset(fields["votes"]), _ballot(fields["promised"])
    return Commitments(fields["committed"], votes, promised, vote, given, handovers)


def _ballot(pair: list[Any]) -> BallotName:
    number, leader = pair
    return number, leader


class PairJournal:
    """The records of pairs in one file. Each write replaces the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Records:
        """The records stored last; empty if the file is damaged, which is logged."""
        fields = {"partners": [], "doubts": [], "vouches": [], **(_read(self._path) or {})}
        doubts = [
            Doubt(number, node, bytes.fromhex(name), bytes.fromhex(it)) for number, node, name, it in fields["doubts"]
        ]
        vouches = tuple(Signed.FromString(bytes.fromhex(vouch)) for vouch in fields["vouches"])
        return Records(dict(fields["partners"]), {doubt.round: doubt for doubt in doubts}, vouches)

    def keep(self, records: Records) -> None:
        """Return once they would survive a power cut. Raises PierError: they cannot be written."""
        doubts = [[it.round, it.decider, it.meeting.hex(), it.digest.hex()] for it in records.doubts.values()]
        partners = [[number, node] for number, node in records.partners.items()]
        vouches = [vouch.SerializeToString().hex() for vouch in records.vouches]
        fields = {"partners": partners, "doubts": doubts, "vouches": vouches}
        _write(self._path, fields, "records of pairs")


def _write(path: Path, fields: dict[str, Any], what: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, seal(fields))
    except OSError as error:
        raise unwritable(f"cannot write down the {what} in {path}", error) from error


def _read(path: Path) -> dict[str, Any] | None:
    """The fields of a file; None when there is no file, or when it is damaged, which is logged."""
    if not path.exists():
        return None
    try:
        return read_sealed(path)
    except Torn as problem:
        log.warning("%s: %s: what it held is forgotten", path, problem)
        return None
