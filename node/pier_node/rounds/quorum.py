"""Who may decide a round, and what: the rules that keep two groups from committing different bits.

Pure: no I/O, no clock. A round is one decision of Paxos (Lamport, "Paxos Made Simple", 2001); its value is the digest
of the next state. A commit needs the vote of *every* member of a group that holds a majority of the last round's
members. Any two such groups share a member. That member tells the leader of the later attempt what it voted for in the
earlier one, and the later attempt finishes that result (adopts it) instead of computing another. docs/protocol.md has
the full argument.

Handovers say who holds whose vote. Each member of a round has one vote, and a site that stops politely gives all votes
that it holds to an heir. Handovers are signed and numbered, so a vote can be followed from its owner: the n-th time it
comes to a site, it leaves with the n-th of that site's handovers that contains it. Where this path ends, there the vote
is, whether or not the last heir has heard of it. A group carries the votes whose last heir is in it, because that heir
shows all of its own handovers. So any two groups that carry the same vote share a member. The vote of a witness
(witness.py) is handed to one member in each round that needs it.

A leader proposes by these rules, and each member repeats its decision (`flaw`): it trusts nobody's word. A proposal
carries the signed announcements of its members, whose signatures are checked before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pier_proto.v1.peer_pb2 import Ballot, Handover, Proposal, Ready, Share, Value


@dataclass(frozen=True)
class Fresh:
    """Nothing can have been decided yet: compute a result."""


@dataclass(frozen=True)
class Adopt:
    """Some site may have committed this result: finish it. `holders` have it."""

    value: Value
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Blocked:
    """Sites that are absent may have committed a result: wait for one of `missing`."""

    missing: tuple[str, ...]


LEAP = 1 << 20
"""No series of attempts reaches a ballot number this far above what others have seen: such a number is made up."""


@dataclass(frozen=True)
class Base:
    """Whose votes decide a round.

    Attributes:
        members: members of the last committed round; each of them has one vote.
        convicted: nodes that have voted twice (double_votes.py).
        witness: the node whose vote decides if the members' votes are split evenly (witness.py); "" if the run has
            none: then it is the vote of the lowest node id, so that one of two sites can survive the loss of the other.
    """

    members: Collection[str]
    convicted: Collection[str] = ()
    witness: str = ""

    @property
    def votes(self) -> frozenset[str]:
        """All votes that count."""
        return frozenset({*self.members, self.witness} - {""})


def has_quorum(votes: Collection[str], base: Base) -> bool:
    """Whether a group may decide: it needs a majority of the members' votes, or half of them and the deciding vote.

    A site that stops politely hands its votes to one other site. A vote is in one hand at a time, so two groups cannot
    both have most of them.

    A majority of the unconvicted members is a quorum too: a convicted node votes on any side, so with its vote the
    group would be a quorum anyway; and two such quorums share a member.
    """
    honest = {*base.members} - {*base.convicted}
    return _has_most(votes, base.members, base.witness) or (
        len(honest) < len(base.members) and _has_most(votes, honest, base.witness)
    )


def _has_most(votes: Collection[str], members: Collection[str], witness: str) -> bool:
    twice, size = 2 * len({*votes} & {*members}), len(members)
    return twice > size or (twice == size > 0 and (witness or min(members)) in {*votes})


def leader_of(nodes: Collection[str], leaders: Collection[str]) -> str:
    """The leader of the coming round: of these nodes, the lowest of those that may lead if any, else the lowest.

    A site that has just arrived cannot put itself in front of all others.

    Args:
        leaders: members of the last round; in a pipeline, the electors among them.
    """
    return min({*nodes} & {*leaders} or nodes, default="")


def order(ballot: Ballot) -> tuple[int, str]:
    """Sort key of ballots: number, then leader. A site takes part only in ballots above all those before."""
    return ballot.number, ballot.leader


def next_ballot(readies: Iterable[Ready], leader: str) -> Ballot:
    """A ballot above every one in which the group has taken part."""
    return Ballot(number=1 + max((ready.seen.number for ready in readies), default=0), leader=leader)


def choose_value(
    readies: Collection[Ready], voters: Collection[str] | None = None, convicted: Collection[str] = ()
) -> Fresh | Adopt | Blocked:
    """What an attempt of exactly these members must do.

    Args:
        voters: nodes whose word about votes counts: members of the last round, and heirs of their votes. Any two
            quorums share one of them, so nobody else is needed. None counts everyone.
        convicted: nodes that have voted twice: nobody waits for a result that only they may have.

    Only the newest vote counts (Paxos). Its result is finished if any site here holds it. If none does, because its
    voters were restarted, the vote is void once it is certain that nobody can have committed it: either one of its
    members is here and never voted for it, or all of them are here. A vote is also void if another member contradicted
    it in the attempt that computed its result: its voter saw that not all members were for it.
    """
    heard = [ready for ready in readies if voters is None or ready.node in voters]
    votes = [ready for ready in heard if ready.HasField("voted")]
    if not votes:
        return Fresh()
    newest = max(order(vote.voted_in) for vote in votes)
    top = [vote for vote in votes if order(vote.voted_in) == newest]
    if len({bytes(vote.voted.digest) for vote in top}) > 1 or any(vote.HasField("refutation") for vote in top):
        return Fresh()
    value = top[0].voted
    here = {ready.node for ready in readies}
    holders = tuple(sorted(vote.node for vote in heard if vote.holds and vote.voted.digest == value.digest))
    if holders:
        return Adopt(value, holders)
    missing = tuple(node for node in value.members if node not in {*here, *convicted})
    return Blocked(missing) if missing and not _withheld(value, top, heard) else Fresh()


def _withheld(value: Value, top: Collection[Ready], readies: Collection[Ready]) -> bool:
    """Whether a member of the attempt that computed `value` is here, did not vote for it, and never will."""
    voters = {ready.node for ready in top}
    computed = all(order(vote.voted_in) == order(value.origin) for vote in top)
    return computed and any(ready.node in value.members and ready.node not in voters for ready in readies)


def choose_group(
    readies: Mapping[str, Ready], accusers: frozenset[str], enough: Callable[[frozenset[str]], bool]
) -> frozenset[str]:
    """The members of the next attempt: all that are ready, except those that others lost or refused.

    While any suspicion between chosen members is left, the member in most of them goes, as accuser or as suspect. Among
    equals, the first to go is one that brings no tokens, then the one suspected most often, then the highest node id.

    Args:
        accusers: nodes whose suspicions count.
        enough: whether a group could commit; nobody goes whom that would cost it.
    """
    group = frozenset(readies)
    while True:
        pairs = [(accuser, node) for accuser in group & accusers for node in readies[accuser].suspects if node in group]
        if not pairs:
            return group
        named = Counter(node for pair in pairs for node in pair)
        suspected = Counter(node for _, node in pairs)
        last = max(named, key=lambda node: (named[node], not readies[node].tokens, suspected[node], node))
        if not enough(group - {last}):
            return group
        group -= {last}


def carried(group: Collection[str], handovers: Iterable[Handover]) -> frozenset[str]:
    """The votes that a group carries.

    Args:
        handovers: those that its members show for the round in question; each member shows all of its own, and
            those by which it got votes. Their signatures have been checked.
    """
    told = list(handovers)
    votes = {*group, *(vote for it in told for vote in it.votes)}
    return frozenset(vote for vote, holder in holders(votes, told).items() if holder in group)


def holders(votes: Iterable[str], handovers: Iterable[Handover]) -> dict[str, str]:
    """The holder of each of these votes, as far as the handovers tell."""
    given = _by_giver(handovers)
    return {vote: _holder(vote, given) for vote in votes}


def received(handovers: Iterable[Handover], last: Handover) -> frozenset[str]:
    """Those votes of a handover that reached its heir by it.

    Args:
        handovers: those that the giver shows, this one among them.
    """
    given = _by_giver(handovers)
    return frozenset(vote for vote in last.votes if _holder(vote, given) == last.heir)


def needed(group: Collection[str], base: Base, handovers: Iterable[Handover]) -> list[Handover]:
    """The few handovers that show a group's quorum, if it has one; members could make up any number of others.

    Args:
        handovers: as for `carried`.
    """
    told = list(handovers)
    given, shown = _by_giver(told), dict[bytes, Handover]()
    paths = sorted(
        (path for vote in base.votes - {*group} if (path := _path(vote, given)) and path[-1].heir in group), key=len
    )
    for path in [[], *paths]:
        shown |= {it.SerializeToString(): it for it in path}
        if has_quorum(carried(group, shown.values()), base):
            return list(shown.values())
    return told


def _by_giver(handovers: Iterable[Handover]) -> dict[str, list[Handover]]:
    given: dict[str, dict[int, Handover]] = {}
    for it in handovers:
        given.setdefault(it.node, {})[it.number] = it
    return {node: [numbered[number] for number in sorted(numbered)] for node, numbered in given.items()}


def _holder(vote: str, given: Mapping[str, Sequence[Handover]]) -> str:
    path = _path(vote, given)
    return path[-1].heir if path else vote


def _path(vote: str, given: Mapping[str, Sequence[Handover]]) -> list[Handover]:
    """The handovers by which a vote went from hand to hand."""
    node, visits, path = vote, Counter[str](), list[Handover]()
    while True:
        leaves = [it for it in given.get(node, ()) if vote in it.votes]
        if visits[node] == len(leaves):
            return path
        path.append(leaves[visits[node]])
        visits[node] += 1
        node = path[-1].heir


@dataclass(frozen=True)
class Announcement:
    """A member's announcement with the handovers that it rests on; all their signatures have been checked."""

    ready: Ready
    handovers: Sequence[Handover] = ()


def votes_of(announced: Mapping[str, Announcement]) -> frozenset[str]:
    """The votes that a group carries."""
    return carried(announced, _shown(announced))


def voters_of(announced: Mapping[str, Announcement], base: Base) -> frozenset[str]:
    """Nodes whose word about earlier votes counts: members of the last round, and holders of votes that count."""
    return frozenset({*base.members, *holders(base.votes, _shown(announced)).values()} & {*announced})


def _shown(announced: Mapping[str, Announcement]) -> list[Handover]:
    return [
        it
        for by in announced.values()
        for it in by.handovers
        if (it.round + 1, it.base) == (by.ready.round, by.ready.base)
    ]


def flaw(
    proposal: Proposal,
    mine: Ready,
    announced: Mapping[str, Announcement],
    base: Base,
    leaders: Collection[str],
    length: int,
) -> str:
    """Why a member must not take part, in words; empty if it may.

    Args:
        mine: what the member announced; the proposal must rest on exactly that.
        leaders: who may lead, as for `leader_of`.
        length: number of parameters.
    """
    group = [share.node for share in proposal.shares]
    if proposal.round != mine.round:
        return "another round"
    if order(proposal.ballot) <= order(mine.seen):
        return "an old ballot"
    if group != sorted(set(group)) or group != [*announced]:
        return "members out of order"
    if mine.node not in announced or announced[mine.node].ready.nonce != mine.nonce:
        return "stale"
    group_flaw = _flaw_of_group(proposal, mine, announced, base, leaders)
    return group_flaw or _flaw_of_shares(proposal, announced, length)


def _flaw_of_group(
    proposal: Proposal,
    mine: Ready,
    announced: Mapping[str, Announcement],
    base: Base,
    leaders: Collection[str],
) -> str:
    readies = [it.ready for it in announced.values()]
    if any((ready.round, ready.base) != (mine.round, mine.base) for ready in readies):
        return "members at another state"
    if not has_quorum(votes_of(announced), base):
        return "no quorum"
    leader = proposal.ballot.leader
    if leader not in leaders and not {*leaders}.isdisjoint(announced):
        return "a leader that may not lead while others are here that may"
    if proposal.ballot != next_ballot(readies, leader):
        return "a ballot that does not follow"
    if proposal.ballot.number > mine.seen.number + LEAP:
        return "a ballot far above all that this site has seen"
    decision = choose_value(readies, voters_of(announced, base), base.convicted)
    if isinstance(decision, Blocked):
        return "a result may have been committed by others"
    adopts = decision.value if isinstance(decision, Adopt) else None
    told = proposal.adopt if proposal.HasField("adopt") else None
    return "" if told == adopts else "another result than the announcements ask for"


def _flaw_of_shares(proposal: Proposal, announced: Mapping[str, Announcement], length: int) -> str:
    for share in proposal.shares:
        ready = announced[share.node].ready
        if (share.tokens, share.norm) != (ready.tokens, ready.norm):
            return "other tokens, or another norm, than were announced"
    return "" if _covers(proposal.shares, length) else "shards do not cover the vector"


def _covers(shares: Collection[Share], length: int) -> bool:
    done = 0
    for share in shares:
        if share.offset != done:
            return False
        done += share.length
    return done == length
