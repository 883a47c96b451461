"""Double votes: two votes by one node in one round that no honest node casts, and the nodes that they convict.

A quorum is a majority, so a lying member can vote for one result on one side of a partition and for another on the
other side (docs/protocol.md, "What liars can do"). Every vote is signed and names its node's previous vote. An honest
node votes once in a ballot, and its later vote names the earlier one. Two votes that break this rule convict their node
before everyone, whatever else the two sides believe. The proof is as good from any site as from the one that found it,
so no authority is needed.

Convicted nodes are kept on disk, excluded at once, and made known to all sites.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from pier_node.base import durable
from pier_node.rounds.proofs import Proofs
from pier_node.rounds.quorum import order
from pier_node.rounds.statements import Statements
from pier_node.wire.bounds import DOUBLE_VOTES, parse
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Ballot, DoubleVote, Link, Ready, Vote


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


VOTED_TWICE = "voted for two results of one round, as only a site does that lies or has lost its journal"
CONVICTED_FILE = "double-votes.json"

log = logging.getLogger(__name__)


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
        self._found: dict[str, DoubleVote] = {}

    @property
    def proven(self) -> list[DoubleVote]:
        """The double votes, to pass on to others."""
        return list(self._found.values())

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
            known = proof.one.node in self._found or len(self._found) >= DOUBLE_VOTES
            if known or not (self._proofs.newest < 0 or self._proofs.has_member(proof.one.node)):
                continue
            node = read_double_vote(proof, self._statements)
            self._put_out(node, proof)
            self._note()

    def _put_out(self, node: str, proof: DoubleVote) -> None:
        self._found[node] = proof
        self._statements.convicted.add(node)
        self._bar([node], VOTED_TWICE)

    def _note(self) -> None:
        noted = [it.SerializeToString().hex() for it in self.proven]
        try:
            durable.replace(self._path, durable.seal({"double_votes": noted}))
        except OSError as error:
            log.error("%s: %s: a restart may forget who voted twice", self._path, error.strerror)
