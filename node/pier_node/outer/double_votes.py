"""Double votes: two votes of one node in one round that no honest node casts, and what they prove.

A quorum is a majority, so a member that lies can vote for one result on one side of a partition and for another on the
other side (docs/protocol.md, "What liars can do"). Every vote is signed and names the vote of its node before it. An
honest node votes once in a ballot, and its later vote knows of the earlier one. Two votes that break this rule are
proof for everybody, of whatever else the two sides hold to be true.
"""

from __future__ import annotations

from pier.v1.peer_pb2 import Ballot, DoubleVote, Link, Ready, Vote
from pier_node.outer.quorum import order
from pier_node.outer.statements import Statements
from pier_node.wire.carrier import BadMessage


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
    """The node that a double vote convicts. Raises BadMessage: it convicts nobody."""
    one, other = statements.read(Vote, proof.one), statements.read(Vote, proof.other)
    if not contradict(one, other):
        raise BadMessage(f"two votes of {one.node} that do not contradict each other")
    return one.node


def double_votes(ours: Link, theirs: Link, statements: Statements) -> list[DoubleVote]:
    """What two proofs of different states of one round convict. Raises BadMessage: a vote is not signed."""
    here = {signed.node: signed for signed in ours.votes}
    found = (DoubleVote(one=here[signed.node], other=signed) for signed in theirs.votes if signed.node in here)
    return [it for it in found if contradict(statements.read(Vote, it.one), statements.read(Vote, it.other))]


def refutes(refutation: Vote, ready: Ready) -> bool:
    """Whether this vote shows that nobody can have committed what an announcement's node voted for.

    A commit needs equal votes of all members of an attempt, and this member of it voted for something else.
    """
    in_it = refutation.round == ready.round and order(refutation.ballot) == order(ready.voted_in)
    return in_it and refutation.digest != ready.voted.digest and refutation.node in ready.voted.members


def remembers(vote: Vote, ready: Ready) -> bool:
    """Whether a vote names the same earlier vote of its node as the announcement on which it rests."""
    voted = ready.HasField("voted")
    prior, digest = (ready.voted_in, ready.voted.digest) if voted else (Ballot(), b"")
    return vote.HasField("prior") == voted and vote.prior == prior and vote.prior_digest == digest
