"""Proofs: how a site proves to another that a state was committed, starting from a state that the other trusts.

A link consists of the votes of a whole group for one state. It follows from a trusted state if the group carried a
quorum of the votes of that state's members: then the group had at least one honest member, and an honest member votes
only on the basis of a committed state. So a chain needs a link only where members change, and one for the newest state.
The first state of a run has the signature of its founder alone.

A site keeps the links that it knows in one append-only file. Each record holds the size and the CRC-32 of a link, then
the link itself. A newcomer needs only the last links and those at which members change. The others are kept to find
out, after a partition, who voted on both sides of it.

A pulse that claims a later round than this site's is only a claim. Its site is asked for the proof in the background
(ProgressChecks); until it has given it, this site continues as before. A site whose proof fails is asked again after a
pause that doubles each time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pier_node.base import durable
from pier_node.base.durable import unwritable
from pier_node.base.errors import PierError
from pier_node.base.tasks import cancel_and_wait
from pier_node.outer.state import OuterState
from pier_node.rounds.quorum import carried, has_quorum
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Ballot, Handover, Link, Manifest, StateRequest, Vote

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
    base = statements.base(trusted.members)
    if not has_quorum(told, base):  # before anything slow: anybody can send names
        raise BadMessage(f"a proof of round {link.round} without a majority of the members of round {trusted.round}")
    first = sorted(link.votes, key=lambda signed: signed.node not in trusted.members)
    read = {signed.node: statements.read(Vote, signed) for signed in first}
    votes = [read[node] for node in group]
    plan = plan_name(link.base, link.ballot, group, link.members)
    if any((it.round, it.digest, it.ballot, it.plan) != (link.round, link.digest, link.ballot, plan) for it in votes):
        raise BadMessage(f"a proof of round {link.round} with votes for something else")
    handovers = [statements.read(Handover, signed) for signed in link.handovers]
    relevant = [it for it in handovers if it.round + 1 == link.round and it.base == link.base]
    if not has_quorum(carried([vote.node for vote in votes], relevant), base):
        raise BadMessage(f"a proof of round {link.round} without a majority of the members of round {trusted.round}")
    return _proven(link)


def alone(state: OuterState, base: bytes, statements: Statements) -> Link:
    """The proof of a state that a group of one commits; for a run's first state `base` is empty."""
    (node,) = state.members
    ballot = Ballot(number=1, leader=node)
    plan = plan_name(base, ballot, [node], [node])
    signed = statements.seal(Vote(node=node, round=state.round, ballot=ballot, digest=state.digest, plan=plan))
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


class _Kept(NamedTuple):
    """One version of the file; whoever reads keeps it, while a thread writes the next.

    Attributes:
        end: offset of the first byte after the last complete link.
    """

    file: BinaryIO | None
    entries: list[_Entry]
    end: int

    def entry(self, round: int) -> _Entry | None:
        return next((it for it in reversed(self.entries) if it.state.round == round), None)

    def read(self, entry: _Entry) -> Link:
        """Raises PierError: the file cannot be read, or is not what it was when it was opened."""
        assert self.file is not None
        path, size = self.file.name, _HEAD.size + entry.size
        try:
            record = os.pread(self.file.fileno(), size, entry.offset - _HEAD.size)
        except OSError as error:
            raise unwritable(f"cannot read {path}", error) from error
        for link, _, _ in _links(record):
            return link
        raise PierError(f"{path} is damaged", "Start pier-node again: it goes on with what is left of the file.")


class Proofs:
    """The links that a site knows; a link is on disk before the site says that it holds the state that it proves."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = _Kept(None, [], 0)
        if path.exists():
            self._open()
        elif (earlier := path.with_name(EARLIER_FILE)).exists():
            self._migrate(earlier)

    def add(self, links: Sequence[Link]) -> None:
        """Return once the links would survive a power cut. Blocks. Raises PierError."""
        try:
            self._append(links)
            if self._kept.end > LARGE:
                self._thin()
        except OSError as error:
            raise unwritable(f"cannot write down the proof of a round in {self._path}", error) from error

    def after(self, round: int) -> list[Link]:
        """The links that a site needs if it trusts the state of that round: all of them, or a first part.

        Raises PierError: the file cannot be read.
        """
        kept = self._kept
        entries = [it for it in kept.entries if it.state.round > round]
        needed = essential([it.state.members for it in entries])
        size, page = 0, list[Link]()
        for entry in (entries[index] for index in needed):
            size += entry.size
            if page and size > PAGE:
                break
            page.append(kept.read(entry))
        return page

    @property
    def first(self) -> int:
        """The earliest round with a link; 0 if there is none."""
        entries = self._kept.entries
        return entries[0].state.round if entries else 0

    @property
    def newest(self) -> int:
        """The latest round with a link; -1 if there is none."""
        entries = self._kept.entries
        return entries[-1].state.round if entries else -1

    def at(self, round: int) -> Trusted | None:
        """The state of that round, if its link is kept."""
        entry = self._kept.entry(round)
        return entry.state if entry else None

    def has_member(self, node: str) -> bool:
        """Whether a node was a member of any state whose link is kept."""
        return any(node in it.state.members for it in reversed(self._kept.entries))

    def of(self, round: int) -> Link | None:
        """The link of that round, if it is kept. Raises PierError: the file cannot be read."""
        kept = self._kept
        entry = kept.entry(round)
        return kept.read(entry) if entry else None

    def _append(self, links: Iterable[Link]) -> None:
        """Append links. A round's link is written before its state; after a crash in between another can replace it."""
        data, (reader, entries, end) = b"", self._kept
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
        if reader is None:
            durable.sync(self._path.parent)
            reader = self._path.open("rb")
        self._kept = _Kept(reader, entries, end + len(data))

    def _thin(self) -> None:
        kept = self._kept
        entries, half = kept.entries, len(kept.entries) // 2
        needed = [*essential([it.state.members for it in entries[:half]]), *range(half, len(entries))]
        durable.replace(self._path, b"".join(_record(kept.read(entries[index])) for index in needed))
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
        self._kept = _Kept(file, entries, end)

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
        if not record or len(record) < size or zlib.crc32(record) != checksum:  # a power cut may leave zeros
            return
        yield Link.FromString(record), start, size
        start += size


TIMEOUT = 10.0
"""Seconds within which a peer must answer with a part of its proof."""
PAGES = 1000
"""Most parts that one proof may have."""
FIRST_PAUSE, LAST_PAUSE = 2.0, 600.0
"""Seconds until a site that could not prove its claim is asked again: the first pause, and the longest."""
AT_ONCE = 3
"""Most members that are asked at once, and most other sites; a single valid proof is enough."""
LOOK = 5.0
"""Seconds between two searches for claims, if no pulse brings news earlier."""


@dataclass
class Trust:
    """What a site trusts, and how far a peer has led it on from there.

    Attributes:
        state: the trusted state that the links lead to.
        given: fingerprint of the next state, which is then trusted without proof; "" if there is none.
    """

    state: Trusted
    statements: Statements
    links: list[Link] = field(default_factory=list)
    given: str = ""

    @classmethod
    def of_fingerprint(cls, fingerprint: str, statements: Statements) -> Trust:
        """The trust of a newcomer that was given the fingerprint of a committed state. Raises PierError."""
        match = re.fullmatch(r"(\d{1,15})-[0-9a-f]{40}", fingerprint)
        if not match:
            raise PierError(
                f"--trust {fingerprint}: not the fingerprint of a state, such as 12-3fa9…",
                "`pier-node status` shows it at a site that you trust.",
            )
        return cls(Trusted(int(match[1]) - 1, b"", ()), statements, given=fingerprint)

    def learn(self, links: list[Link]) -> None:
        """Follow links. Raises BadMessage if one of them proves nothing."""
        for link in links:
            if not self.given:
                self.state = follow(self.state, link, self.statements)
            elif (first := _proven(link)).fingerprint == self.given:
                self.state, self.given = first, ""
            else:
                raise BadMessage(f"its state of round {link.round} is not the one that this site was told to trust")
            self.links.append(link)

    def admit(self, manifest: Manifest) -> None:
        """Check that the state described by a manifest was committed. Raises BadMessage."""
        self.learn([link for link in manifest.proof if link.round > self.state.round])
        if (self.state.round, self.state.digest) != (manifest.round, manifest.digest):
            raise BadMessage(f"its state of round {manifest.round} comes without proof that it was committed")

    async def led_by(self, peer: str, carrier: Carrier) -> None:
        """Learn everything that a peer can prove. Raises PeerLost."""
        for _ in range(PAGES):
            request = StateRequest(trusted=self.state.round + 1, proof_only=True)
            told = await carrier.call(peer, DESCRIBE, request, TIMEOUT)
            try:
                if told.proof:
                    self.learn(list(told.proof))
                if not told.proof or self.state.round >= told.round:
                    self.admit(told)
                    return
            except BadMessage as bad:
                raise PeerLost(peer, str(bad)) from bad
        raise PeerLost(peer, "its proof has no end")


@dataclass
class _Doubt:
    until: float
    pause: float


class ProgressChecks:
    """Asks sites that claim a later round for their proof.

    Args:
        here: returns the state that this site has.
    """

    def __init__(self, carrier: Carrier, roster: Roster, statements: Statements, here: Callable[[], Trusted]) -> None:
        self._carrier, self._roster, self._statements, self.here = carrier, roster, statements, here
        self._proven: dict[str, Trust] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}

    def sources(self) -> list[str]:
        """Sites that are ahead and have proved it."""
        return [node for node in self._roster.ahead(self.here().round) if self.proof_of(node)]

    def proof_of(self, node: str) -> Trust | None:
        """How far a site has proved that it is ahead; None if it has not."""
        trust = self._proven.get(node)
        return trust if trust and trust.state.round > self.here().round else None

    def unproven(self) -> set[str]:
        """Sites that say they are ahead, were asked for the proof, and could not give it."""
        return {*self._doubts} & {*self._roster.ahead(self.here().round)}

    async def run(self) -> None:
        """Ask for proofs; runs forever."""
        try:
            while True:
                self._ask()
                await self._roster.changed.wait(LOOK)
        finally:
            await cancel_and_wait(*self._asked.values())

    def _ask(self) -> None:
        now, here = asyncio.get_running_loop().time(), self.here()
        ahead = self._roster.ahead(here.round)
        self._doubts = {node: it for node, it in self._doubts.items() if node in self._roster.contacts}
        self._proven = {node: it for node, it in self._proven.items() if it.state.round > here.round}
        for node in ahead:
            doubt = self._doubts.get(node)
            if node in self._proven or node in self._asked or (doubt and now < doubt.until):
                continue
            alike = [other for other in self._asked if (other in here.members) == (node in here.members)]
            if len(alike) >= AT_ONCE:
                continue
            task = self._asked[node] = asyncio.create_task(self._prove(node, here))
            task.add_done_callback(lambda _, node=node: self._asked.pop(node, None))  # type: ignore[misc]

    async def _prove(self, node: str, here: Trusted) -> None:
        trust = Trust(here, self._statements)
        try:
            await trust.led_by(node, self._carrier)
        except PeerLost as lost:
            pause = min(2 * self._doubts[node].pause, LAST_PAUSE) if node in self._doubts else FIRST_PAUSE
            self._doubts[node] = _Doubt(asyncio.get_running_loop().time() + pause, pause)
            log.info("%s has not proved yet that it is ahead: %s", node, lost.reason)
            return
        self._doubts.pop(node, None)
        self._proven[node] = trust
        self._roster.changed.notify()
