"""Proofs: how a site proves to another that a state was committed, starting from a state that the other trusts.

A link consists of the votes of a whole group for one state. It follows from a trusted state if the group carried a
quorum of the votes of that state's members: then the group had at least one honest member, and an honest member votes
only on the basis of a committed state. So a chain needs a link only where members change, and one for the newest state.
The first state of a run has the signature of its founder alone.

A site keeps the links that it knows in one append-only file. Each record holds the size and the CRC-32 of a link, then
the link itself. A newcomer needs only the last links and those at which members change. The others are kept to find
out, after a partition, who voted on both sides of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.outer.state import OuterState
from pier_node.rounds.quorum import has_quorum
from pier_node.rounds.statements import Statements, carried
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Ballot, Handover, Link, Vote

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trusted:
    """A state trusted to be committed. Before the first one: round -1, with the founder as its only member."""

    round: int
    digest: bytes
    members: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """What people pass on outside the run, so that a newcomer can start to trust from here."""
        said = json.dumps([self.round, self.digest.hex(), list(self.members)])
        return f"{self.round}-{hashlib.sha256(said.encode()).hexdigest()[:40]}"


def plan_name(base: bytes, ballot: Ballot, group: Sequence[str], members: Sequence[str]) -> bytes:
    """SHA-256 of what all votes of an attempt have in common besides round and digest."""
    fields = [base.hex(), ballot.number, ballot.leader, list(group), list(members)]
    return hashlib.sha256(json.dumps(fields).encode()).digest()


def follow(trusted: Trusted, link: Link, statements: Statements) -> Trusted:
    """The state that a link proves to a site that trusts that one. Raises BadMessage if it proves nothing."""
    if link.round <= trusted.round or (link.round == trusted.round + 1 and link.base != trusted.digest):
        raise BadMessage(f"a proof of round {link.round} that does not follow from round {trusted.round}")
    group = [signed.node for signed in link.votes]
    if group != sorted(set(group)):
        raise BadMessage("a proof whose votes are out of order")
    told = [*group, *(signed.node for signed in link.handovers)]
    base, convicted = trusted.members, statements.convicted
    if not has_quorum(told, base, convicted):  # before anything slow: anybody can send names
        raise BadMessage(f"a proof of round {link.round} without a majority of the members of round {trusted.round}")
    first = sorted(link.votes, key=lambda signed: signed.node not in trusted.members)
    read = {signed.node: statements.read(Vote, signed) for signed in first}
    votes = [read[node] for node in group]
    plan = plan_name(link.base, link.ballot, group, link.members)
    if any((it.round, it.digest, it.ballot, it.plan) != (link.round, link.digest, link.ballot, plan) for it in votes):
        raise BadMessage(f"a proof of round {link.round} with votes for something else")
    if not has_quorum(_carried(votes, link, statements), base, convicted):
        raise BadMessage(f"a proof of round {link.round} without a majority of the members of round {trusted.round}")
    return Trusted(link.round, bytes(link.digest), tuple(link.members))


def _carried(votes: Iterable[Vote], link: Link, statements: Statements) -> frozenset[str]:
    handovers = [statements.read(Handover, signed) for signed in link.handovers]
    relevant = [it for it in handovers if it.round + 1 == link.round and it.base == link.base]
    return carried([vote.node for vote in votes], relevant)


def alone(state: OuterState, base: bytes, statements: Statements) -> Link:
    """The proof of a state that a group of one commits; for a run's first state `base` is empty."""
    (node,) = state.members
    ballot = Ballot(number=1, leader=node)
    plan = plan_name(base, ballot, [node], [node])
    vote = Vote(node=node, round=state.round, ballot=ballot, digest=state.digest, plan=plan)
    signed = statements.seal(vote)
    return Link(round=state.round, digest=state.digest, base=base, ballot=ballot, members=[node], votes=[signed])


def essential(members: Sequence[Sequence[str]]) -> list[int]:
    """Indices of the links that a newcomer needs: the first, those at which members change, and the last two.

    The link of a round is on disk before its state is, so after a crash in between the last but one is needed.

    Args:
        members: members of the state of each link, in order of rounds.
    """
    last = len(members) - 2
    return [at for at, these in enumerate(members) if at == 0 or at >= last or these != members[at - 1]]


PROOFS_FILE = "proofs.bin"
EARLIER_FILE = "proofs.json"
"""The file of earlier versions, which held the essential links only."""
PAGE = 1 << 20
"""Most bytes of links in one answer: a site that needs more asks again."""
LARGE = 64 << 20
"""Size of the file in bytes above which its older half is thinned to the essential links."""

_HEAD = struct.Struct(">II")


@dataclass(frozen=True)
class _Entry:
    """Where a link is in the file, and what it proves."""

    state: Trusted
    offset: int
    size: int


class Proofs:
    """The links that a site knows; a link is on disk before the site says that it holds the state that it proves."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._entries: list[_Entry] = []
        self._end = 0
        if path.exists():
            self._open()
        elif (earlier := path.with_name(EARLIER_FILE)).exists():
            self._migrate(earlier)

    def add(self, links: Sequence[Link]) -> None:
        """Return once the links would survive a power cut. Blocks. Raises PierError."""
        try:
            self._append(links)
            if self._end > LARGE:
                self._thin()
        except OSError as error:
            problem = f"{self._path}: cannot write down the proof of a round: {error.strerror}"
            raise PierError(problem, "Free some space there and start again.") from error

    def after(self, round: int) -> list[Link]:
        """The links that a site needs if it trusts the state of that round: all of them, or a first part."""
        entries = [it for it in self._entries if it.state.round > round]
        needed = essential([it.state.members for it in entries])
        size, page = 0, list[Link]()
        for entry in (entries[index] for index in needed):
            size += entry.size
            if page and size > PAGE:
                break
            page.append(self._read(entry))
        return page

    @property
    def first(self) -> int:
        """The earliest round with a link; 0 if there is none."""
        return self._entries[0].state.round if self._entries else 0

    @property
    def newest(self) -> int:
        """The latest round with a link; -1 if there is none."""
        return self._entries[-1].state.round if self._entries else -1

    def at(self, round: int) -> Trusted | None:
        """The state of that round, if its link is kept."""
        entry = self._entry(round)
        return entry.state if entry else None

    def has_member(self, node: str) -> bool:
        """Whether a node was a member of any state whose link is kept."""
        return any(node in it.state.members for it in reversed(self._entries))

    def of(self, round: int) -> Link | None:
        """The link of that round, if it is kept."""
        entry = self._entry(round)
        return self._read(entry) if entry else None

    def _entry(self, round: int) -> _Entry | None:
        return next((it for it in reversed(self._entries) if it.state.round == round), None)

    def _read(self, entry: _Entry) -> Link:
        assert self._file is not None
        return Link.FromString(os.pread(self._file.fileno(), entry.size, entry.offset))

    def _append(self, links: Iterable[Link]) -> None:
        """Append links. A round's link is written before its state; after a crash in between another can replace it."""
        data, entries, end = b"", self._entries, self._end
        for link in links:
            entries, record = [it for it in entries if it.state.round < link.round], _record(link)
            offset = end + len(data) + _HEAD.size
            entries.append(_Entry(_proven(link), offset, len(record) - _HEAD.size))
            data += record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.truncate(end)  # removes what a crash left half-written
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if self._file is None:
            durable.sync(self._path.parent)
            self._file = self._path.open("rb")
        self._entries, self._end = entries, end + len(data)

    def _thin(self) -> None:
        half = len(self._entries) // 2
        kept = [*essential([it.state.members for it in self._entries[:half]]), *range(half, len(self._entries))]
        durable.replace(self._path, b"".join(_record(self._read(self._entries[index])) for index in kept))
        self._open()

    def _open(self) -> None:
        try:
            file = self._path.open("rb")
        except PermissionError as error:
            raise durable.forbidden(self._path, error) from error
        data, entries, end = file.read(), list[_Entry](), 0
        for link, offset, size in _links(data):
            while entries and entries[-1].state.round >= link.round:
                entries.pop()
            entries.append(_Entry(_proven(link), offset, size))
            end = offset + size
        if _is_damaged(data[end:]):
            log.warning(
                "%s is damaged: this site cannot prove to newcomers what was committed before its next round",
                self._path,
            )
        self._file, self._entries, self._end = file, entries, end

    def _migrate(self, earlier: Path) -> None:
        try:
            links = [Link.FromString(bytes.fromhex(it)) for it in durable.read_sealed(earlier)["links"]]
        except durable.Torn as torn:
            log.warning("%s: this site cannot prove to newcomers what was committed before its next round", torn)
            return
        self.add(links)
        earlier.unlink()


def _proven(link: Link) -> Trusted:
    return Trusted(link.round, bytes(link.digest), tuple(link.members))


def _record(link: Link) -> bytes:
    data = link.SerializeToString()
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def _links(data: bytes) -> Iterator[tuple[Link, int, int]]:
    """The links of complete records, with offset and size in bytes, up to the first incomplete record."""
    start = 0
    while start + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        record = data[start : start + size]
        if len(record) < size or zlib.crc32(record) != checksum:
            return
        yield Link.FromString(record), start, size
        start += size


def _is_damaged(rest: bytes) -> bool:
    """Whether the bytes after the last complete record are more than a record that a crash cut off."""
    return len(rest) >= _HEAD.size and _HEAD.size + _HEAD.unpack_from(rest)[0] <= len(rest)
