"""Explores every order of what can happen to the rule of rounds: breadth first, for a few sites and rounds.

What is explored is the rule itself: rounds/commitments.py and rounds/quorum.py are called as they are. Network, disks
and time are played. A message may arrive late or never; a site may crash before and after each durable write, stop
politely, come back at any time, lose its newest state or its journal. Where steps commute, or where one world allows
all that another does, one stands for both:

- a site that is down is one that does nothing for a while;
- a member takes part in an attempt when that is proposed, or never: what it does in between voids its announcement;
- it gives an attempt up when it takes part in the next one;
- a vote that is on its sender's disk may arrive at any time; everybody may follow everybody who is ahead;
- a witness answers at once or after its answer was lost, and whoever asks it proves the state that it has.

The invariant: of each round one result is committed, by whoever commits it and whenever.
"""

from __future__ import annotations

from ast import literal_eval
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, combinations
from typing import Generic, NamedTuple, TypeVar

from pier_node.rounds.commitments import NO_BALLOT, BallotName, Cast, Commitments, as_ballot
from pier_node.rounds.quorum import Adopt, Base, Blocked, Fresh, carried, choose_value, has_quorum
from pier_proto.v1.peer_pb2 import Handover, Ready

T = TypeVar("T", bound=Hashable)

WITNESS = "w"


class Digest(NamedTuple):
    """A result: its round, the ballot that computed it, and its members, one letter each."""

    round: int
    origin: BallotName
    members: str


class Attempt(NamedTuple):
    """A proposal of which all members took part; it names everything about it."""

    base: Digest
    ballot: BallotName
    group: str
    result: Digest
    holders: tuple[str, ...]
    """Members that may hold the result in the end: of all attempts at it."""


class Site(NamedTuple):
    """What a site's disk has, and what it would lose in a crash."""

    state: Digest
    bound: Commitments
    on_disk: Digest
    """Its state, unless a part of the rule is taken out."""
    shadow: Digest | None = None
    attempt: int = 0
    """Number of the attempt that it is in; 0: none."""

    @property
    def votes(self) -> frozenset[str]:
        return self.bound.votes if self.state.round == self.bound.committed else frozenset()

    def shown(self, name: str) -> frozenset[bytes]:
        """Its own handovers, and what proves those that it got."""
        ours = (
            Handover(node=name, heir=it.heir, number=number, votes=sorted(it.votes)).SerializeToString(
                deterministic=True
            )
            for number, it in enumerate(self.bound.given, 1)
        )
        return self.bound.handovers.union(ours)


class Sent(NamedTuple):
    """Votes on their way to an heir, and what the giver shows."""

    giver: int
    heir: int
    round: int
    votes: frozenset[str]
    shown: frozenset[bytes]


class Budget(NamedTuple):
    """What may still happen."""

    proposals: int
    crashes: int = 0
    stops: int = 0
    losses: int = 0


class World(NamedTuple):
    """Everything, at one moment; sites and attempts by their numbers."""

    sites: tuple[int, ...]
    votes: frozenset[tuple[int, str]]
    """Of the attempts that somebody is in."""
    handovers: frozenset[Sent]
    committed: tuple[Digest, ...]
    budget: Budget
    witnessed: tuple[int, str] = (-1, "")
    """The round after which the witness gave its last vote, and to whom."""


@dataclass(frozen=True)
class Rule:
    """The rule; with a part of it taken out the explorer must find a fork."""

    keeps_what_it_fetches: bool = True
    remembers_what_it_committed: bool = True
    remembers_given_votes: bool = True
    remembers_promises: bool = True
    remembers_votes: bool = True
    adopts: bool = True
    witness_remembers: bool = True

    def after_restart(self, name: str, bound: Commitments, round: int) -> Commitments:
        """What binds a site that comes back with the state of a round."""
        if not self.remembers_what_it_committed and round < bound.committed:
            bound = Commitments.fresh(round, name)
        if not self.remembers_given_votes:
            bound = replace(bound, votes=frozenset(name), given=(), handovers=frozenset())
        if not self.remembers_promises:
            bound = replace(bound, promised=bound.vote.ballot if bound.vote else NO_BALLOT)
        if not self.remembers_votes:
            bound = replace(bound, vote=None)
        return bound.settled(round, name)


class Fork(AssertionError):
    """Two results of one round were committed; the message tells how it came to that."""


Announced = tuple[tuple[str, BallotName, Cast | None, bool], ...]
"""Of each member: its name, its promise, its vote, and whether it holds the result that it voted for."""


@lru_cache(maxsize=1 << 18)
def _chosen(announced: Announced) -> Fresh | Blocked | tuple[bytes, tuple[str, ...]]:
    readies = []
    for name, promised, vote, holds in announced:
        ready = Ready(node=name, round=1, seen=as_ballot(promised), holds=holds)
        if vote:
            ready.voted.CopyFrom(vote.value)
            ready.voted_in.CopyFrom(as_ballot(vote.ballot))
        readies.append(ready)
    found = choose_value(readies)
    return (found.value.digest, tuple(found.value.members)) if isinstance(found, Adopt) else found


class Numbers(Generic[T]):
    """Gives equal things one number, from 1 on, so that worlds are compared fast."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._things: list[T] = []

    def of(self, thing: T) -> int:
        """The number of a thing."""
        number = self._numbers.setdefault(thing, len(self._things) + 1)
        if number > len(self._things):
            self._things.append(thing)
        return number

    def __getitem__(self, number: int) -> T:
        return self._things[number - 1]


@lru_cache(maxsize=1 << 16)
def _carried(group: str, shown: frozenset[bytes]) -> frozenset[str]:
    return carried(group, map(Handover.FromString, shown))


@dataclass
class Explorer:
    """All that can follow from a beginning.

    Args:
        names: the sites, one letter each.
        base: members of round 0, among them.
        rounds: the last round that is decided.
        witness: WITNESS: there is one; "": there is none.
    """

    names: str
    base: str
    rounds: int
    budget: Budget
    rule: Rule = field(default_factory=Rule)
    witness: str = ""

    def __post_init__(self) -> None:
        self._sites, self._attempts = Numbers[Site](), Numbers[Attempt]()

    def run(self, most: int = 1 << 30) -> int:
        """Explore all, or `most`; how many worlds there are. Raises Fork."""
        beginning = Digest(0, NO_BALLOT, self.base)
        sites = tuple(self._sites.of(Site(beginning, Commitments.fresh(0, it), beginning)) for it in self.names)
        first = World(sites, frozenset(), frozenset(), (beginning,), self.budget)
        came: dict[World, tuple[World, str] | None] = {first: None}
        queue = deque([first])
        while queue and len(came) < most:
            world = queue.popleft()
            for what, following in self._steps(world):
                if following not in came:
                    came[following] = world, what
                    queue.append(following)
                    if len({digest.round for digest in following.committed}) < len(following.committed):
                        raise Fork(_story(came, following))
        return len(came)

    def _steps(self, world: World) -> Iterator[tuple[str, World]]:
        budget = world.budget
        if budget.proposals:
            yield from self._proposals(world._replace(budget=budget._replace(proposals=budget.proposals - 1)))
        for index, (name, site) in enumerate(zip(self.names, self._all(world))):
            if site.attempt:
                yield from self._in_attempt(world, index, site)
            yield from self._follows(world, index, site)
            if self.witness:
                yield from self._asks(world, index, site)
            if budget.stops and site.votes and not site.bound.engaged:
                yield from self._stops(world._replace(budget=budget._replace(stops=budget.stops - 1)), index, site)
            if budget.crashes:
                left = world._replace(budget=budget._replace(crashes=budget.crashes - 1))
                yield f"{name} crashes", self._with(left, index, self._restarted(index, site))
                if budget.losses:
                    yield from self._losses(left._replace(budget=left.budget._replace(losses=0)), index, site)
        for handover in world.handovers:
            yield from self._delivered(world, handover)

    # --- a round -----------------------------------------------------------------------------------

    def _proposals(self, world: World) -> Iterator[tuple[str, World]]:
        able = [
            index for index, it in enumerate(self._all(world)) if it.bound.committed <= it.state.round < self.rounds
        ]
        for members in chain.from_iterable(combinations(able, size) for size in range(1, len(able) + 1)):
            sites, group = [self._sites[world.sites[it]] for it in members], "".join(self.names[it] for it in members)
            base = sites[0].state
            if any(it.state != base for it in sites):
                continue
            shown = frozenset().union(*(it.shown(name) for name, it in zip(group, sites)))
            if not has_quorum(_carried(group, shown), Base(base.members, witness=self.witness)):
                continue
            announced = tuple(
                (name, it.bound.promised, it.bound.vote, bool(it.shadow)) for name, it in zip(group, sites)
            )
            decision = _chosen(announced) if self.rule.adopts else Fresh()
            if isinstance(decision, Blocked):
                continue
            number = 1 + max(it.bound.promised[0] for it in sites)
            for leader in self.names:
                attempt = _attempt(base, (number, leader), group, decision)
                for part in chain.from_iterable(combinations(members, size) for size in range(1, len(members) + 1)):
                    following = world
                    for index in part:
                        site = self._sites[world.sites[index]]
                        bound = site.bound.promising(attempt.ballot)
                        entered = self._attempts.of(attempt) if part == members else 0
                        following = self._with(following, index, site._replace(bound=bound, attempt=entered))
                    if part == members or len(members) > 1:
                        names = "".join(self.names[it] for it in part)
                        yield f"{leader} proposes {attempt.result} to {group}, {names} take part", following

    def _in_attempt(self, world: World, index: int, site: Site) -> Iterator[tuple[str, World]]:
        name, attempt = self.names[index], self._attempts[site.attempt]
        if (site.attempt, name) not in world.votes:
            if attempt.result.origin == attempt.ballot or any(it.shadow == attempt.result for it in self._all(world)):
                result = attempt.result
                cast = Cast(
                    attempt.ballot,
                    result.origin,
                    repr((result.round, *result.origin, result.members)).encode(),
                    attempt.holders,
                )
                voted = world._replace(votes=world.votes | {(site.attempt, name)})
                voting = site._replace(bound=site.bound.casting(cast), shadow=result)
                yield f"{name} votes for {result}", self._with(voted, index, voting)
        elif all((site.attempt, member) in world.votes for member in attempt.group):
            yield f"{name} commits {attempt.result}", self._settled(world, index, site, attempt.result, keeps=True)

    def _follows(self, world: World, index: int, site: Site) -> Iterator[tuple[str, World]]:
        for state in {it.state for it in self._all(world) if it.state.round > site.state.round}:
            keeps = self.rule.keeps_what_it_fetches or state == site.shadow
            yield f"{self.names[index]} follows to {state}", self._settled(world, index, site, state, keeps)

    def _asks(self, world: World, index: int, site: Site) -> Iterator[tuple[str, World]]:
        """Ask the witness, which trusts the newest state that it was shown."""
        name, (after, heir), round = self.names[index], world.witnessed, site.state.round
        is_free = round > after or not self.rule.witness_remembers
        may_ask = name in site.state.members and site.bound.committed <= round
        if not may_ask or not (is_free or (after, heir) == (round, name)):
            return
        given = world._replace(witnessed=(round, name))
        if is_free:
            yield f"the witness gives {name} its vote, and its answer is lost", given
        handed = Handover(node=WITNESS, heir=name, number=1, votes=[WITNESS]).SerializeToString(deterministic=True)
        taken = site._replace(bound=site.bound.taking(round, frozenset(WITNESS), frozenset([handed])))
        yield f"the witness gives {name} its vote", self._with(given, index, taken)

    def _settled(self, world: World, index: int, site: Site, state: Digest, keeps: bool) -> World:
        bound = site.bound.settled(state.round, self.names[index])
        shadow = site.shadow if bound.vote else None
        settled = Site(state, bound, state if keeps else site.on_disk, shadow)
        committed = tuple(sorted({*world.committed, state}))
        return self._with(world._replace(committed=committed), index, settled)

    # --- coming and going ----------------------------------------------------------------------------

    def _restarted(self, index: int, site: Site) -> Site:
        bound = self.rule.after_restart(self.names[index], site.bound, site.on_disk.round)
        return Site(site.on_disk, bound, site.on_disk)

    def _losses(self, world: World, index: int, site: Site) -> Iterator[tuple[str, World]]:
        """In a crash: of its newest state, or of its journal."""
        for earlier in [it for it in world.committed if it.round == site.on_disk.round - 1]:
            rolled_back = self._restarted(index, site._replace(on_disk=earlier))
            yield f"{self.names[index]} crashes and loses its newest state", self._with(world, index, rolled_back)
        torn = site._replace(bound=Commitments.fresh(site.on_disk.round + 1, self.names[index]))
        yield (
            f"{self.names[index]} crashes and loses its journal",
            self._with(world, index, self._restarted(index, torn)),
        )

    def _stops(self, world: World, index: int, site: Site) -> Iterator[tuple[str, World]]:
        for heir in range(len(self.names)):
            if heir != index:
                giving = site._replace(bound=site.bound.giving(self.names[heir]))
                given, shown = self._restarted(index, giving), giving.shown(self.names[index])
                handover = Sent(index, heir, site.bound.committed, site.votes, shown)
                left = world._replace(handovers=world.handovers | {handover})
                yield f"{self.names[index]} stops, {self.names[heir]} its heir", self._with(left, index, given)

    def _delivered(self, world: World, handover: Sent) -> Iterator[tuple[str, World]]:
        heir, name = self._sites[world.sites[handover.heir]], self.names[handover.heir]
        world = world._replace(handovers=world.handovers - {handover})
        yield f"votes for {name} get lost", world
        if heir.bound.committed == handover.round and self.names[handover.giver] in heir.state.members:
            taken = heir._replace(bound=heir.bound.taking(handover.round, handover.votes, handover.shown))
            yield f"{name} inherits", self._with(world, handover.heir, taken)

    def _all(self, world: World) -> list[Site]:
        return [self._sites[number] for number in world.sites]

    def _with(self, world: World, index: int, site: Site) -> World:
        """With this site as it is now; votes in attempts that nobody is in any more are forgotten."""
        sites = (*world.sites[:index], self._sites.of(site), *world.sites[index + 1 :])
        following = world._replace(sites=sites)
        if not world.votes:
            return following
        inside = {it.attempt for it in self._all(following)}
        return following._replace(votes=frozenset(it for it in world.votes if it[0] in inside))


def _attempt(base: Digest, ballot: BallotName, group: str, decision: Fresh | tuple[bytes, tuple[str, ...]]) -> Attempt:
    if isinstance(decision, Fresh):
        return Attempt(base, ballot, group, Digest(base.round + 1, ballot, group), tuple(group))
    written, holders = decision
    return Attempt(base, ballot, group, _read(written), tuple(sorted({*holders, *group})))


def _written(result: Digest) -> bytes:
    return repr((result.round, *result.origin, result.members)).encode()


def _read(written: bytes) -> Digest:
    round, number, leader, members = literal_eval(written.decode())
    return Digest(round, (number, leader), members)


def _story(came: dict[World, tuple[World, str] | None], world: World) -> str:
    story = list[str]()
    while before := came[world]:
        world, what = before
        story.append(what)
    return "; ".join(reversed(story))
