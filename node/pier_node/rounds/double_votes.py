"""Double votes: two votes of a node in one round that no honest node casts, whom they convict, and how they are found.

A quorum is a majority, so a lying member can vote for one result on one side of a partition and for another on the
other side (docs/protocol.md, "What liars can do"). Every vote is signed and names its node's previous vote. An honest
node votes once in a ballot, and its later vote names the earlier one. Two votes that break this rule convict their node
before everyone, whatever else the two sides believe. The proof is as good from any site as from the one that found it,
so no authority is needed. Convicted nodes are kept on disk, excluded at once, and made known to all sites.

The VoteBook counts the votes of the coming round: who voted for what in which ballot, and who voted for two things.

Disputes find sites that hold a different history of the run than this one. Atomic rounds give all sites one history. If
there are two, a member voted on both sides of a partition. This site asks a peer for its links (proofs.py) if the
peer's pulse names a different digest for a round that this site has, or if the peer cannot prove from here that it is
ahead. A bisection finds the first round that differs, and the votes of both sides there are compared. What a pulse says
is only a claim: without a link nothing follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.config.run import SITES
from pier_node.rounds.commitments import BallotName
from pier_node.rounds.proofs import TIMEOUT, ProgressChecks, Proofs, follow
from pier_node.rounds.quorum import order
from pier_node.rounds.roster import Roster
from pier_node.rounds.statements import Statements
from pier_node.wire.bounds import DOUBLE_VOTES, parse
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Ballot, DoubleVote, Link, Pulse, Ready, Signed, StateRequest, Value, Vote

log = logging.getLogger(__name__)


def contradict(one: Vote, other: Vote) -> bool:
    """Whether no honest node casts both of these votes."""
    if (one.node, one.round) != (other.node, other.round) or one.digest == other.digest:
        return False
    earlier, later = sorted((one, other), key=lambda vote: order(vote.ballot))
    if order(earlier.ballot) == order(later.ballot):
        return True
    known = order(later.prior)
    forgot = known < order(earlier.ballot)
    return forgot or (known == order(earlier.ballot) and later.prior_digest != earlier.digest)


def read_double_vote(proof: DoubleVote, statements: Statements) -> str:
    """The node that a double vote convicts. Raises BadMessage if it convicts nobody."""
    one, other = statements.read(Vote, proof.one), statements.read(Vote, proof.other)
    if not contradict(one, other):
        raise BadMessage(f"two votes of {one.node} that do not contradict each other")
    return one.node


def double_votes(ours: Link, theirs: Link, statements: Statements) -> list[DoubleVote]:
    """The double votes in two proofs of different states of one round. Raises BadMessage if a vote is not signed."""
    here = {signed.node: signed for signed in ours.votes}
    found = (DoubleVote(one=here[signed.node], other=signed) for signed in theirs.votes if signed.node in here)
    return [it for it in found if contradict(statements.read(Vote, it.one), statements.read(Vote, it.other))]


def refutes(refutation: Vote, ready: Ready) -> bool:
    """Whether this vote shows that nobody can have committed what an announcement's node voted for.

    A commit needs equal votes from all members of an attempt, and this member of it voted for something else.
    """
    in_it = refutation.round == ready.round and order(refutation.ballot) == order(ready.voted_in)
    return in_it and refutation.digest != ready.voted.digest and refutation.node in ready.voted.members


def remembers(vote: Vote, ready: Ready) -> bool:
    """Whether a vote names the same earlier vote of its node as the announcement on which it rests."""
    voted = ready.HasField("voted")
    prior, digest = (ready.voted_in, ready.voted.digest) if voted else (Ballot(), b"")
    return vote.HasField("prior") == voted and vote.prior == prior and vote.prior_digest == digest


class VoteBook:
    """The votes of the coming round that have arrived, including those of attempts that we have not heard of yet.

    It keeps the newest few of each sender: a sender of many votes pushes out only its own.
    """

    EACH = 4
    """Number of votes kept per sender."""

    def __init__(self) -> None:
        self._votes: dict[str, dict[BallotName, tuple[Vote, Signed]]] = {}

    def of(self, ballot: Ballot) -> dict[str, Vote]:
        """Votes in a ballot, by node."""
        name = order(ballot)
        return {node: votes[name][0] for node, votes in self._votes.items() if name in votes}

    def signed(self, ballot: Ballot, group: Iterable[str]) -> list[Signed]:
        """The votes of these members in a ballot, as they signed them."""
        return [self._votes[node][order(ballot)][1] for node in group]

    def count(self, vote: Vote, signed: Signed, welcome: Collection[str]) -> DoubleVote | None:
        """Note a vote. When the book is full, unwelcome senders make room for welcome ones.

        Returns a proof that the node lies, if this vote contradicts one of its earlier votes.
        """
        if vote.node not in self._votes and len(self._votes) >= SITES:
            strangers = self._votes.keys() - welcome
            if vote.node not in welcome or not strangers:
                return None
            del self._votes[strangers.pop()]
        votes = self._votes.setdefault(vote.node, {})
        against = [its for earlier, its in votes.values() if contradict(earlier, vote)]
        votes.setdefault(order(vote.ballot), (vote, signed))  # the first counts: a link may rest on it already
        if len(votes) > self.EACH:
            del votes[min(votes)]
        return DoubleVote(one=against[0], other=signed) if against else None

    def refutation(self, ballot: Ballot, value: Value) -> Signed | None:
        """A vote that refutes a result: by a member of the attempt that computed it, for another; None if none does."""
        if order(ballot) != order(value.origin):
            return None
        votes = self.of(ballot)
        others = [node for node in value.members if node in votes and votes[node].digest != value.digest]
        return self.signed(ballot, others[:1])[0] if others else None

    def clear(self) -> None:
        """Forget all votes: the round is over."""
        self._votes.clear()


VOTED_TWICE = "voted for two results of one round, as only a site does that lies or has lost its journal"
CONVICTED_FILE = "double-votes.json"


class Convicted:
    """The convicted nodes that this site knows of.

    Args:
        proofs: only members of the run's rounds can be convicted, since others may prove anything against themselves; a
            newcomer, which knows no members yet, accepts any.
        bar: excludes these nodes from now on.
    """

    def __init__(
        self, folder: Path, statements: Statements, proofs: Proofs, bar: Callable[[Iterable[str], str], None]
    ) -> None:
        self._path, self._statements, self._proofs, self._bar = folder / CONVICTED_FILE, statements, proofs, bar

    @property
    def proven(self) -> list[DoubleVote]:
        """The double votes, to pass on to others."""
        return list(self._statements.convicted.values())

    def restore(self) -> None:
        """Exclude the nodes that are noted on disk. Raises PierError if this user may not read the file."""
        if not self._path.exists():
            return
        try:
            noted = durable.read_sealed(self._path)["double_votes"]
            for proof in [parse(DoubleVote, bytes.fromhex(it)) for it in noted]:
                self._put_out(read_double_vote(proof, self._statements), proof)
        except (durable.Torn, KeyError, ValueError, BadMessage) as torn:
            log.warning("%s is damaged; the peers will tell who voted twice: %s", self._path, torn)

    def take(self, proofs: Iterable[DoubleVote]) -> None:
        """Exclude and note nodes that are proved to have voted twice. Raises BadMessage if a proof proves nothing."""
        for proof in proofs:
            known = proof.one.node in self._statements.convicted or len(self._statements.convicted) >= DOUBLE_VOTES
            if known or not (self._proofs.newest < 0 or self._proofs.has_member(proof.one.node)):
                continue
            self._put_out(read_double_vote(proof, self._statements), proof)
            self._note()

    def _put_out(self, node: str, proof: DoubleVote) -> None:
        self._statements.convicted[node] = proof
        self._bar([node], VOTED_TWICE)

    def _note(self) -> None:
        noted = [it.SerializeToString().hex() for it in self.proven]
        try:
            durable.replace(self._path, durable.seal({"double_votes": noted}))
        except OSError as error:
            log.error("%s: %s: a restart may forget who voted twice", self._path, error.strerror)


FIRST_PAUSE, LAST_PAUSE = 5.0, 600.0
"""Seconds until a site is asked again: the first pause, and the longest."""
LOOK = 1.0
"""Seconds between two comparisons of all peers' digests with ours."""


@dataclass
class _Pause:
    until: float = 0.0
    seconds: float = FIRST_PAUSE


class Disputes:
    """Disputes of this site with sites on its roster.

    Args:
        convict: excludes the node that a double vote convicts.
        claims: names the nodes whose proof that they are ahead does not follow from this site's state.
    """

    def __init__(
        self,
        carrier: Carrier,
        roster: Roster,
        proofs: Proofs,
        statements: Statements,
        convict: Callable[[DoubleVote], None],
        claims: ProgressChecks,
    ) -> None:
        self._carrier, self._roster, self._proofs, self._statements = carrier, roster, proofs, statements
        self._convict, self._claims = convict, claims
        self._pauses: dict[str, _Pause] = {}
        self._told: set[int] = set()

    async def run(self) -> None:
        """Examine every dispute, one after another; runs forever."""
        while True:
            for node, pulse in self._disputed().items():
                try:
                    await self._examine(node, pulse.round)
                except (PeerLost, BadMessage) as problem:
                    log.debug("%s says that it holds another history, and does not prove it: %s", node, problem)
                except PierError as error:
                    log.warning("the dispute with %s cannot be settled: %s", self._roster.called(node), error)
            await asyncio.sleep(LOOK)

    def _disputed(self) -> dict[str, Pulse]:
        """The peers to ask now, members of the run's rounds first."""
        now, pulses, unproven = asyncio.get_running_loop().time(), self._roster.pulses(), self._claims.unproven()
        found = [node for node, pulse in pulses.items() if node in unproven or self._differs(pulse)]
        self._pauses = {node: it for node, it in self._pauses.items() if node in self._roster.contacts}
        due = [node for node in found if node != self._roster.node and now >= self._pauses.get(node, _Pause()).until]
        for node in due:
            pause = self._pauses.setdefault(node, _Pause())
            pause.until, pause.seconds = now + pause.seconds, min(2 * pause.seconds, LAST_PAUSE)
        return {node: pulses[node] for node in sorted(due, key=lambda node: not self._proofs.has_member(node))}

    def _differs(self, pulse: Pulse) -> bool:
        ours = self._proofs.at(pulse.round) if pulse.round <= self._claims.here().round else None
        return ours is not None and pulse.digest not in (b"", ours.digest)

    async def _examine(self, node: str, high: int) -> None:
        """Find the first round that differs.

        Raises PeerLost, BadMessage if a link is not what it should be, and PierError if ours cannot be read.
        """
        held = self._claims.here().round  # after a crash the file may have the link of a state that nobody holds
        low, high, first = self._proofs.first - 1, min(high, self._proofs.newest, held), None
        while low < high:
            middle = (low + high + 1) // 2
            theirs = await self._next_link(node, middle)
            ours = self._proofs.of(theirs.round) if theirs else None
            if theirs and ours and ours.digest == theirs.digest:
                low = theirs.round
                continue
            high = middle - 1
            if theirs and ours:
                first = ours, theirs
        if first:
            self._compare(node, *first)

    async def _next_link(self, node: str, round: int) -> Link | None:
        """The first link that a site has for that round or a later one."""
        told = await self._carrier.call(node, DESCRIBE, StateRequest(trusted=round, proof_only=True), TIMEOUT)
        return told.proof[0] if told.proof and told.proof[0].round >= round else None

    def _compare(self, node: str, ours: Link, theirs: Link) -> None:
        for proof in double_votes(ours, theirs, self._statements):
            self._convict(proof)
        before = self._proofs.at(ours.round - 1)
        if before is None or ours.round in self._told:
            return
        follow(before, theirs, self._statements)
        self._told.add(ours.round)
        both = {it.node for it in ours.votes} & {it.node for it in theirs.votes}
        log.error(
            "round %d was committed twice, as %s here and as %s at %s; %s voted for both. The run has two histories: "
            "keep the sites of one, and start the others again with empty data folders (docs/protocol.md)",
            ours.round,
            ours.digest.hex()[:12],
            theirs.digest.hex()[:12],
            self._roster.called(node),
            ", ".join(map(self._roster.called, sorted(both))) or "nobody",
        )
