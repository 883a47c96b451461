"""A member of a run that means it no good: it holds the token, speaks the protocol, and lies where a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from processes.run import Run

from pier_node.base.shared import SharedVector
from pier_node.config.run import load
from pier_node.identity.certificates import credentials
from pier_node.identity.node import Identity, Signer
from pier_node.outer.advance import advance
from pier_node.outer.layout import Layout
from pier_node.outer.mean import Update
from pier_node.outer.schedule import round_plan
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.attempt import Advance, Tools
from pier_node.rounds.catch_up import Wanted, fetch_state
from pier_node.rounds.double_votes import Convicted
from pier_node.rounds.member import Rounds
from pier_node.rounds.proofs import PROOFS_FILE, Proofs, alone
from pier_node.rounds.roster import Roster, sign_entry
from pier_node.rounds.statements import SignedStatements
from pier_node.rounds.suspects import Behind
from pier_node.site.join import Reception
from pier_node.site.journal import Journal
from pier_node.wire.carrier import GATHER, HELLO, VOTE, Chunk, PeerLost
from pier_node.wire.grpc.carrier import GrpcCarrier
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import (
    Ballot,
    HelloReply,
    HelloRequest,
    Link,
    Phase,
    Proposal,
    Pulse,
    Ready,
    Share,
    Signed,
    Site,
    Value,
    Vote,
)

NAME = "rogue"


class Lie(Update):
    """An update that announces a norm of one, whatever it is."""

    norm = 1.0


class Rogue:
    """It follows the run's rounds, so that it can take part in the next."""

    def __init__(self, run: Run, folder: Path) -> None:
        config, self.identity = load(run.path), _lowest(run)
        self._config = config
        self.length = Layout.of(config.model).length
        self.site = Site(node=self.identity.node, name=NAME, slot=0)
        self.carrier = GrpcCarrier(self.identity.node, config.hash(), credentials(self.identity, run.token))
        self._signer = Signer(self.identity, config.hash())
        self.roster = Roster(self.carrier, self._pulse, signer=self._signer)
        self._statements = SignedStatements(self._signer)
        proofs = Proofs(folder / PROOFS_FILE)
        convicted = Convicted(folder, self._statements, proofs, self.roster.bar)
        self._reception = Reception(self.carrier, self.roster, config, lambda: self.site, convicted)
        tools = Tools(
            *(self.carrier, self.roster, self._statements, Journal(folder / "journal.json")),
            *(proofs, _nowhere, _nothing),
        )
        nothing = {ANCHOR: SharedVector(self.length)}
        self.rounds = Rounds(tools, OuterState(0, (), nothing, {}), lambda _: self.length)
        self._peers = [site.address for site in run.sites]
        self._boast = 0
        self._links: list[Link] = []
        self.proposed, self.refused, self.asked_for_proof = set[str](), 0, 0

    def _pulse(self) -> Pulse:
        state = self.rounds.state
        coming = state.round + 1
        return Pulse(
            site=self.site,
            phase=Phase.PHASE_WAITING,
            round=state.round + self._boast,
            digest=bytes(32) if self._boast else state.digest,
            training_for=coming,
        )

    @asynccontextmanager
    async def in_the_run(self) -> AsyncIterator[None]:
        """Be on everybody's roster meanwhile."""
        choice = await self.carrier.listen("127.0.0.1:0", None, self._peers)
        self.site.address = choice.address
        sign_entry(self.site, self._signer, version=1)
        try:
            assert await self._reception.introduce(self._peers) == len(self._peers)
            yield
        finally:
            await self.roster.stop()
            await self.carrier.stop()

    async def take_part(self, update: Update, advance: Advance) -> None:
        """Bring this to one round after the other, until cancelled."""
        leader = asyncio.create_task(self.rounds.run())
        try:
            while True:
                await self._follow()
                try:
                    await self.rounds.commit(update, advance)
                except Behind:
                    continue
        finally:
            leader.cancel()

    async def vote_twice(self, node: str) -> None:
        """Be a member like others, but for two votes in each coming round to one site, until that refuses to listen."""
        honest = asyncio.create_task(self.take_part(Update(np.zeros(self.length, np.float32), 1), self._honest))
        try:
            await self.roster.changed.until(lambda: self.carrier.node in self.rounds.state.members)
            told = Vote(node=self.carrier.node, ballot=Ballot(number=1 << 10, leader=node), plan=bytes(32))
            while True:
                told.round = self.rounds.coming()
                for told.digest in (bytes(32), bytes([1]) * 32):
                    await self.carrier.call(node, VOTE, self._statements.seal(told), 10.0)
        except PeerLost:
            self.refused += 1
        finally:
            honest.cancel()

    def _honest(self, state: OuterState, mean: SharedVector, tokens: Mapping[str, int]) -> OuterState:
        plan = round_plan(self._config, state.round + 1)
        return advance(state, mean, tokens, plan=plan, layout=Layout.of(self._config.model), inner=self._config.inner)

    async def _follow(self) -> None:
        """It asks for no proof: it has nothing to lose."""

        def ahead() -> list[str]:
            return self.roster.ahead(self.rounds.state.round)

        await self.roster.changed.until(lambda: bool(ahead()) or self.rounds.state.round > 0)
        while peers := ahead():
            try:
                fetched = await fetch_state(self.carrier, peers, Wanted(self.length))
                await self.rounds.adopt(fetched.state, fetched.proof)
            except PeerLost:
                await self.roster.changed.wait(1.0)

    async def replay(self, node: str, votes: int) -> None:
        """Send a site votes for every round up to its own, and for the next, in ballots that nobody proposed."""
        await self.roster.changed.until(lambda: node in self.roster.ahead(0))
        pulse = self.roster.pulse_of(node)
        assert pulse
        for number in range(votes):
            ballot = Ballot(number=1 + number % 7, leader=node)
            told = Vote(node=self.carrier.node, round=1 + number % (pulse.round + 1), ballot=ballot)
            told.digest = told.plan = bytes(32)
            await self.carrier.call(node, VOTE, self._statements.seal(told), 10.0)

    async def name_ghosts(self, count: int) -> None:
        """Tell of so many sites that do not exist, until cancelled; each has a key, an address and a signed entry."""
        run_hash, ghosts = self._signer.run_hash, []
        for number in range(count):
            identity = Identity(ec.generate_private_key(ec.SECP256R1()))
            entry = Site(node=identity.node, name=f"ghost-{number}", address=f"127.1.{number // 256}.{number % 256}:9")
            ghosts.append(sign_entry(entry, Signer(identity, run_hash), version=1))

        async def answer(sender: str, request: HelloRequest) -> HelloReply:
            reply = await self._reception.answer(sender, request)
            reply.roster.extend(ghosts)
            return reply

        self.carrier.serve(HELLO, answer)
        await asyncio.Event().wait()

    async def forge(self, run: Run) -> None:
        """Answer every site with a group of itself and everybody's votes, then vote for all of them, until cancelled.

        Its announcement is the site's own, as that has signed it; so is everything that it can copy.
        """
        nodes = sorted(site.node for site in run.sites)

        async def propose(sender: str, signed: Signed) -> Proposal:
            ready = self._statements.read(Ready, signed)
            mine = Ready.FromString(signed.statement)
            mine.node, mine.nonce, mine.tokens = self.carrier.node, b"rogue", 0
            mine.votes[:] = nodes
            del mine.handovers[:]
            told = sorted([(sender, ready, signed), (self.carrier.node, mine, self._statements.seal(mine))])
            half = self.length // 2
            parts = [(0, half), (half, self.length - half)]
            shares = [
                Share(node=node, tokens=it.tokens, norm=it.norm, offset=offset, length=length)
                for (node, it, _), (offset, length) in zip(told, parts, strict=True)
            ]
            ballot = Ballot(number=ready.seen.number + 1, leader=self.carrier.node)
            self.proposed.add(sender)
            return Proposal(
                verdict=Proposal.VERDICT_GO,
                round=ready.round,
                ballot=ballot,
                shares=shares,
                readies=[it for _, _, it in told],
            )

        self.carrier.serve(GATHER, propose)
        await self.roster.changed.until(lambda: set(nodes) <= {*self.roster.ahead(0)})
        while True:
            for node in nodes:
                await self._claim_votes(node, nodes)

    async def _claim_votes(self, node: str, nodes: list[str]) -> None:
        """Announce itself to a site as if it had been given everybody's votes, and vote with them."""
        pulse = self.roster.pulse_of(node)
        assert pulse
        mine, coming = self.carrier.node, pulse.round + 1
        ready = Ready(node=mine, round=coming, votes=nodes, nonce=b"rogue", base=pulse.digest)
        vote = Vote(node=mine, round=coming, ballot=Ballot(number=1, leader=node))
        vote.digest = vote.plan = bytes(32)
        try:
            await self.carrier.call(node, GATHER, self._statements.seal(ready), 1.0)
            await self.carrier.call(node, VOTE, self._statements.seal(vote), 1.0)
        except PeerLost:
            self.refused += 1

    async def invent(self, rounds: int) -> None:
        """Say that it is so many rounds ahead, with a state and a proof that it has signed alone, until cancelled."""
        await self.roster.changed.until(lambda: bool(self.roster.ahead(-1)))
        tensors = {ANCHOR: SharedVector(self.length), MOMENTUM: SharedVector(self.length)}
        state = self.rounds.state = OuterState(rounds, (self.carrier.node,), tensors, {})
        link = alone(state, bytes(32), self._statements)
        StateServer(self.carrier, lambda number, _: state if number in (0, rounds) else None, self._shown)
        self._links = [link]
        self.roster.tell()
        await asyncio.Event().wait()

    def _shown(self, round: int) -> list[Link]:
        self.asked_for_proof += 1
        return self._links

    async def boast(self, rounds: int) -> None:
        """Say that it is so many rounds ahead of what it knows, until cancelled."""
        self._boast = rounds
        await asyncio.Event().wait()

    def cut_short(self) -> None:
        """From now on send half of each chunk."""
        push = self.carrier.push

        async def halves(peer: str, chunks: AsyncIterator[Chunk]) -> None:
            await push(peer, (_halved(chunk) async for chunk in chunks))

        self.carrier.push = halves  # type: ignore[method-assign]

    async def half_a_message(self, node: str, streams: int) -> None:
        """Open so many streams to a site, and never say more in them, until cancelled; those it refuses are over."""
        await asyncio.gather(
            *(self.carrier.push(node, _half(number)) for number in range(streams)), return_exceptions=True
        )
        await asyncio.Event().wait()


def _halved(chunk: Chunk) -> Chunk:
    chunk.data = chunk.data[: len(chunk.data) // 2]
    return chunk


def _lowest(run: Run) -> Identity:
    """An identity below those of all sites: whoever has the lowest id keeps, if members let it."""
    lowest = min(site.node for site in run.sites)
    while (found := Identity(ec.generate_private_key(ec.SECP256R1()))).node > lowest:
        pass
    return found


async def _half(number: int) -> AsyncIterator[Chunk]:
    yield Chunk(round=1 << 40, ballot=Ballot(number=number + 1, leader="0" * 16), stage=Chunk.STAGE_SCATTER)
    await asyncio.Event().wait()


async def _nowhere(state: OuterState) -> None:
    """It does not mean to come back."""


async def _nothing(holders: object, number: int, value: Value) -> OuterState:
    raise PeerLost("", "a rogue keeps nothing")


def astray(state: OuterState, mean: SharedVector, tokens: Mapping[str, int]) -> OuterState:
    """Another next state than everybody's."""
    anchor = SharedVector(len(mean.array))
    anchor.array[:] = state.anchor - np.float32(1.0)
    return OuterState(state.round + 1, tuple(sorted(tokens)), {ANCHOR: anchor}, {})
