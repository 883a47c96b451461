"""Catching up after missed rounds: a whole OuterState from all peers that have it, checked before it is trusted.

One peer describes the state; its manifest proves the digest. Then all peers that hold that state are asked for runs of
pieces until every piece is here: a faster peer asks for its next run sooner. A peer that fails, or sends a piece that
does not match its hash, is dropped and named in the log, and other peers send what it owed. What has arrived outlives a
failed try, and the next one continues where it stopped.

Before that, a site that has a state takes the outer steps that it missed, from the means of those rounds (means.py): a
peer sends the bytes of a mean in a small part of the time of a state. Whatever of its own state is as it should be by
then, be it thanks to these steps or because a round has left it as it was (all fragments but one), is not fetched.

A peer must send a piece within SILENCE seconds. A peer that barely manages this delays nobody while others have the
same state. If not all peers have a state, it must arrive soon, or at a minimum rate; otherwise another state is
requested, and the next try may take twice as long.

On a slow link a state takes minutes or hours, so the log says how much of it has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from pier_node.base.faults import Faults
from pier_node.base.patience import Backoff
from pier_node.base.shared import SharedVector
from pier_node.base.tasks import cancel_and_wait, run_to_end
from pier_node.base.units import age, amount, rate
from pier_node.outer.state import OuterState
from pier_node.rounds.means import Means, MissedStep
from pier_node.rounds.proofs import Trust
from pier_node.rounds.roster import Roster
from pier_node.wire.carrier import DESCRIBE, BadMessage, Carrier, Chunk, PeerLost, PeerRefused
from pier_node.wire.states import Description, Partial, Piece, examine
from pier_proto.v1.peer_pb2 import FetchRequest, Link, StateRequest, Value

SILENCE = 20.0
"""Seconds for which a peer may be silent."""
PATIENCE = 600.0
"""Seconds that the first try may take for a state that not all peers have, if others offer a different state."""
LEAST = 2.0**20
"""Bytes per second; at this rate or above, a try may take longer than PATIENCE."""
EVERY = 15.0
"""Seconds between two lines in the log about what has arrived."""

Progress = Callable[[int, int], None]
"""Called after every piece with (bytes that are here, bytes in all)."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What to fetch.

    Attributes:
        length: parameters of the run's model, or of the stage; every vector must have this many.
        round: number of the state; 0 means the newest state of the first peer that answers.
        shadow: the staged result of `round`, not its state.
        stage: pipeline stage, counted from 1, whose state of version `round` is wanted; 0 means the state of the run.
        digest: refuse any state with another digest; None accepts every state that `trust` admits.
        trust: refuse a peer's newest state without proof that it was committed; None trusts the first peer.
    """

    length: int
    round: int = 0
    shadow: bool = False
    stage: int = 0
    digest: bytes | None = None
    trust: Trust | None = None


@dataclass(frozen=True)
class Fetched:
    """A state.

    Attributes:
        proof: links that prove, from the state trusted before, that this state was committed.
    """

    state: OuterState
    proof: Sequence[Link] = ()


@dataclass(frozen=True)
class Ahead:
    """A state that outer steps led to, from means that nobody has proved; and the peers that gave these."""

    state: OuterState
    givers: frozenset[str] = frozenset()


class Tries:
    """What one try at fetching a state leaves for the next.

    Args:
        others: whether peers other than those asked may have a newer state, so that even a single peer must be fast.
        own: this site's state, if it has one.
        means: how it takes the steps of missed rounds; None: it does not.

    Attributes:
        partial: pieces that are here already, so that they are not fetched.
        ahead: how far missed steps have been taken; None: not at all.
    """

    def __init__(self, others: bool = False, own: OuterState | None = None, means: Means | None = None) -> None:
        self.partial, self.means = Partial(own), means
        self.ahead: Ahead | None = None
        self._others = others
        self._failures = Counter[str]()
        self._patience = PATIENCE

    def order(self, peers: Iterable[str]) -> list[str]:
        """The peers in order; those that could not give the state they announced come last: they may not have any."""
        return sorted(peers, key=self._failures.__getitem__)

    @asynccontextmanager
    async def another(self, peers: Sequence[str]) -> AsyncGenerator[float]:
        """A try that asks these peers; yields its patience, in seconds, for a state that not all of them have."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield self._patience if self._others or len(peers) > 1 else math.inf
        except PeerLost as lost:
            self._failures.update({peers[0], lost.node})
            if loop.time() - began > self._patience:
                self._patience *= 2
            raise


class Arrival:
    """Logs a fetch's progress; it is called after every piece with the bytes that are here and the bytes in all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._told = clock()
        self._before: int | None = None  # bytes that were here before a peer was lost

    def __call__(self, arrived: int, total: int) -> None:
        """Log the progress now and then."""
        now = self._clock()
        if self._before is None:
            self._began, self._before = now, arrived
        if now - self._told < EVERY or arrived == total or now == self._began:
            return
        self._told, speed = now, (arrived - self._before) / (now - self._began)
        left = f", {age((total - arrived) / speed)} left" if speed else ""
        log.info("%s of %s of the run's state are here, at %s%s", amount(arrived), amount(total), rate(speed), left)


class CatchUp:
    """Fetches the newest states, of `length` parameters, from sites ahead of this one, for as long as it takes."""

    def __init__(
        self, carrier: Carrier, roster: Roster, faults: Faults, length: int, means: Means | None = None
    ) -> None:
        self._carrier, self._roster, self._faults = carrier, roster, faults
        self._length, self._means = length, means

    async def newest(
        self, sources: Callable[[], list[str]], trust: Callable[[], Trust], own: OuterState
    ) -> Fetched | None:
        """Fetch the state of the first source; None once there are no sources.

        Args:
            sources: returns the live peers whose states this site should continue from, as of now.
            own: this site's state: only what differs from it is fetched.
        """
        tries = Tries(own=own, means=self._means)
        return await persist(lambda: tries.order(sources()), lambda peers: self._fetch(peers, tries, trust()))

    async def _fetch(self, peers: list[str], tries: Tries, trust: Trust) -> Fetched:
        pulse = self._roster.pulse_of(peers[0])
        if pulse is None:
            raise PeerLost(peers[0], "nobody who is ahead answers")
        await self._faults.reach(pulse.round, "fetching")
        return await fetch_state(self._carrier, peers, Wanted(self._length, trust=trust), tries, Arrival())


async def persist(sources: Callable[[], list[str]], fetch: Callable[[list[str]], Awaitable[T]]) -> T | None:
    """Fetch from the sources of the moment, for as long as it takes; None once there are none."""
    backoff, told = Backoff(), ""
    while peers := sources():
        try:
            return await fetch(peers)
        except PeerLost as lost:
            if lost.reason != told:
                log.warning("cannot catch up yet: %s", lost.reason)
            told = lost.reason
            await asyncio.sleep(backoff.seconds())
    return None


def shadow_fetcher(
    carrier: Carrier, length: int, timeout: float = SILENCE
) -> Callable[[Collection[str], int, Value], Awaitable[OuterState]]:
    """What a member needs to finish a result that it lacks: (holders, round, value) -> the staged state."""

    async def fetch(holders: Collection[str], number: int, value: Value) -> OuterState:
        wanted = Wanted(length, number, shadow=True, digest=value.digest)
        return (await fetch_state(carrier, list(holders), wanted, timeout=timeout)).state

    return fetch


async def fetch_state(
    carrier: Carrier,
    peers: Sequence[str],
    wanted: Wanted,
    tries: Tries | None = None,
    progress: Progress = lambda _arrived, _total: None,
    timeout: float = SILENCE,
) -> Fetched:
    """Fetch a state from peers.

    Args:
        peers: node ids to ask, the preferred one first.
        tries: earlier tries, whose pieces are not fetched again; None: there is one try, however slow its peers are.
        progress: called as the state arrives.
        timeout: seconds for which a peer may be silent before it is dropped.

    Raises:
        PeerLost: no peer is left; `reason` says what happened to each, `node` is the last one.
    """
    if tries is None:
        return await _Transfer(carrier, peers, wanted, timeout, math.inf).run(Tries(), progress)
    async with tries.another(peers) as patience:
        return await _Transfer(carrier, peers, wanted, timeout, patience).run(tries, progress)


class _Transfer:
    """The peers of one transfer, and why some of them were dropped.

    Args:
        patience: seconds for a state that not all peers have, unless it arrives at the minimum rate.
    """

    def __init__(self, carrier: Carrier, peers: Sequence[str], wanted: Wanted, timeout: float, patience: float) -> None:
        self._carrier, self._wanted = carrier, wanted
        self._timeout, self._patience = timeout, patience
        self._peers = list(dict.fromkeys(peers))
        self._all_have_it = len(self._peers) > 1
        self._mark: tuple[float, int] | None = None
        self._lost: dict[str, PeerLost] = {}

    async def run(self, tries: Tries, progress: Progress) -> Fetched:
        """Fetch the state. Raises PeerLost."""
        target, trust = await self._choose(), self._wanted.trust
        if tries.means is not None:
            await self._take_missed_steps(tries, tries.means, target)
        state = target.build(await self._state(target, tries.partial, progress))
        await asyncio.to_thread(lambda: state.norm)
        return Fetched(state, trust.links if trust else ())

    async def _choose(self) -> Description:
        """Choose the state to fetch: the first good description. Raises PeerLost."""
        trust = self._wanted.trust
        for peer in list(self._peers):
            try:
                if trust:
                    await trust.led_by(peer, self._carrier)
                return await self._described(peer, self._request(self._wanted.round), self._wanted.digest, trust)
            except PeerLost as error:
                self._drop(peer, error)
        raise self._nobody()

    async def _state(self, target: Description, partial: Partial, progress: Progress) -> dict[str, SharedVector]:
        """Pull a whole state from all peers that hold it. Raises PeerLost."""
        await run_to_end(asyncio.to_thread(partial.aim, target.state, self._wanted.length))
        request = self._request(target.round)

        async def work(peer: str) -> None:
            try:
                await self._described(peer, request, target.digest)
                await self._pull_runs(peer, request, partial, progress)
            except PeerLost as error:
                self._drop(peer, error)

        await _until_complete(partial, [work(peer) for peer in self._peers])
        if not partial.complete:
            raise self._nobody()
        return partial.hand_over()

    async def _take_missed_steps(self, tries: Tries, means: Means, target: Description) -> None:
        """Bring the own state to the target, if the means of the missed rounds can be had, and lead there.

        No step is proved before the last one is taken. If they lead elsewhere, each peer is asked alone for all of
        them, from the own state on, but for one that has just given all.
        """
        own = tries.partial.own
        if own is None or own.round >= target.round:
            return
        ahead = tries.ahead if tries.ahead and tries.ahead.state.round <= target.round else Ahead(own)
        together, wrong, tries.ahead = [*self._peers], list[str](), None
        for asked in (together, *([peer] for peer in together)):
            if asked == wrong:
                continue
            ahead = await self._steps([*asked], means, ahead, target.round)
            if ahead.state.round < target.round:
                if asked is together:
                    tries.ahead = ahead
                    return
            elif ahead.state.hashes == target.state:
                tries.partial.own = ahead.state
                log.info("took the outer steps of the rounds %d to %d from their means", own.round + 1, target.round)
                return
            else:
                wrong = [*ahead.givers] if asked is together else wrong
                givers = ", ".join(sorted(ahead.givers))
                log.warning("the means of the rounds up to %d that %s sent lead to another state", target.round, givers)
            ahead = Ahead(own)

    async def _steps(self, peers: list[str], means: Means, ahead: Ahead, round: int) -> Ahead:
        """Take the steps up to a round, as far as these peers have the means. A peer that fails is removed."""
        for _ in means.missing(ahead.state, round):
            for peer in list(peers):
                if (state := await self._missed_step(peers, peer, means.step(ahead.state))) is not None:
                    ahead = Ahead(state, ahead.givers | {peer})
                    break
            else:
                break
        return ahead

    async def _missed_step(self, peers: list[str], peer: str, step: MissedStep) -> OuterState | None:
        """Take one step from what a peer sends; None: it sends nothing of use. If others might, it must be fast."""
        try:
            async with asyncio.timeout(min(self._timeout * step.megabytes, max(self._patience, step.megabytes))):
                return await self._stepped(peer, step)
        except PeerRefused as refused:
            log.info("%s has no mean of round %d: %s", peer, step.round, refused.reason)
        except (PeerLost, BadMessage, TimeoutError) as error:
            log.warning("%s sends no mean of round %d: %s", peer, step.round, str(error) or "it is too slow")
            peers.remove(peer)
        return None

    async def _stepped(self, peer: str, step: MissedStep) -> OuterState:
        """Raises PeerLost or BadMessage."""
        async with aclosing(self._chunks(peer, FetchRequest(round=step.round, mean=True))) as chunks:
            async for chunk in chunks:
                await run_to_end(asyncio.to_thread(step.add, chunk.offset, chunk.data))
        return await run_to_end(asyncio.to_thread(step.taken))

    def _request(self, round: int) -> StateRequest:
        return StateRequest(round=round, shadow=self._wanted.shadow, stage=self._wanted.stage)

    async def _described(
        self, peer: str, request: StateRequest, digest: bytes | None, trust: Trust | None = None
    ) -> Description:
        """A peer's description of a state, checked. Raises PeerLost if anything is wrong with it."""
        if trust:
            request = StateRequest(trusted=trust.state.round + 1)
        manifest = await self._carrier.call(peer, DESCRIBE, request, self._timeout)
        try:
            described = examine(manifest, self._wanted.length, self._wanted.stage > 0)
            if trust:
                trust.admit(manifest)
        except BadMessage as error:
            raise PeerLost(peer, f"its manifest is refused: {error}") from error
        if request.round not in (0, described.round):
            raise PeerLost(peer, f"it describes round {described.round}, asked for round {request.round}")
        if digest is not None and described.digest != digest:
            ours, theirs = digest.hex()[:12], described.digest.hex()[:12]
            raise PeerLost(peer, f"its state of round {described.round} has the digest {theirs}, wanted {ours}")
        return described

    async def _pull_runs(self, peer: str, request: StateRequest, partial: Partial, progress: Progress) -> None:
        """Pull one run after another until every piece is here. Raises PeerLost."""
        while await partial.settle():
            run = partial.take(len(self._peers))
            try:
                await self._pull(peer, request, run, partial, progress)
            except BadMessage as error:
                raise PeerLost(peer, str(error)) from error
            finally:
                partial.put_back(run)

    async def _pull(
        self, peer: str, request: StateRequest, run: list[Piece], partial: Partial, progress: Progress
    ) -> None:
        fetch = FetchRequest(
            round=request.round,
            shadow=request.shadow,
            tensor=run[0].tensor,
            offset=run[0].start,
            length=run[-1].end - run[0].start,
            stage=request.stage,
        )
        owed = deque(run)
        async with aclosing(self._chunks(peer, fetch)) as chunks:
            async for chunk in chunks:
                if not owed:
                    raise BadMessage("it sends more than it was asked for")
                partial.accept(owed.popleft(), chunk)
                progress(*partial.progress)
                self._check_pace(peer, partial)
        if owed:
            raise PeerLost(peer, f"it ended a stream {len(owed)} pieces early")

    async def _chunks(self, peer: str, request: FetchRequest) -> AsyncGenerator[Chunk]:
        """A peer's stream; a silent peer times out. Raises PeerLost."""
        stream = self._carrier.pull(peer, request)
        try:
            while True:
                async with asyncio.timeout(self._timeout):
                    chunk = await anext(stream)
                yield chunk
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise PeerLost(peer, f"it sent nothing for {self._timeout:g} s") from error
        finally:
            await stream.aclose()

    def _drop(self, peer: str, error: PeerLost) -> None:
        self._lost[peer] = error
        if peer in self._peers:
            self._peers.remove(peer)
            self._all_have_it = False
        if self._peers:
            log.warning("state transfer: %s is left out: %s", peer, error.reason)

    def _check_pace(self, peer: str, partial: Partial) -> None:
        """Do not wait long for a state that only some have: they may be slow on purpose. Raises PeerLost."""
        if self._all_have_it or partial.complete:
            return
        now, (here, total) = asyncio.get_running_loop().time(), partial.progress
        since, had = self._mark = self._mark or (now, here)
        if now - since > self._patience and here - had < LEAST * (now - since):
            raise PeerLost(peer, f"not all have what it sends, and that comes slowly: {here} of {total} bytes are here")

    def _nobody(self) -> PeerLost:
        reasons = "; ".join(f"{peer}: {error.reason}" for peer, error in self._lost.items())
        return PeerLost(next(reversed(self._lost), ""), f"nobody is left to fetch a state from ({reasons})")


async def _until_complete(partial: Partial, works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run workers until all pieces are here or all workers have given up; then stop those still waiting for a peer."""
    pending = {asyncio.create_task(work) for work in works}
    try:
        while pending and not partial.complete:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        await cancel_and_wait(*pending)
