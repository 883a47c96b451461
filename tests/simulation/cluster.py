"""A run of several sites in virtual time: the real loop, rounds, roster and state transfer; the training is feigned.

Training is counting: an inner step moves one coordinate of the weights, the site's own, and costs one token.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from simulation.network import Network, SimCarrier, Weather
from simulation.statements import MemoryProofs, PlainStatements
from simulation.virtual_time import elsewhere

from pier_node.base import durable
from pier_node.base.faults import Faults
from pier_node.base.shared import SharedVector
from pier_node.config.run import RunConfig
from pier_node.engine import messages
from pier_node.gossip.pair_commit import PairTools, Records
from pier_node.gossip.pair_rounds import PairRounds
from pier_node.gossip.standing import Standing
from pier_node.outer.codec import codec
from pier_node.outer.layout import Layout
from pier_node.outer.mean import weighing
from pier_node.outer.schedule import synced, total_rounds
from pier_node.outer.state import ANCHOR, MOMENTUM, OuterState
from pier_node.rounds.attempt import Tools
from pier_node.rounds.catch_up import shadow_fetcher
from pier_node.rounds.commitments import Commitments
from pier_node.rounds.means import MeanFiles, Means
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.quorum import Base, has_quorum
from pier_node.rounds.reduce import Codes
from pier_node.rounds.roster import Roster
from pier_node.rounds.state_store import Checkpoint
from pier_node.rounds.witness import WITNESS_FILE, Witness
from pier_node.site.agreement import Agreement, InPairs, OfAll, Peers
from pier_node.site.loop import Orders, run_work
from pier_node.site.training import Training
from pier_node.wire.carrier import BadMessage, PeerLost
from pier_node.wire.states import StateServer
from pier_proto.v1.peer_pb2 import Pulse, Site, WitnessReply, WitnessRequest

LENGTH = 12
CHUNK = 2
WITNESS_LOSS = 0.3
"""Part of the witness's answers that are lost."""


class TinyLayout:
    """Stands for a model of so many parameters."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length


class FakeTrainer:
    """Counts its inner steps: each takes some virtual time."""

    noise = 1.0

    def __init__(self, coordinate: int, pace: float, dice: random.Random, length: int = LENGTH) -> None:
        self.outbox, self.adam_m, self.adam_v = (SharedVector(length) for _ in range(3))
        self.coordinate, self.pace, self.dice = coordinate, pace, dice
        self.steps_done = 0
        self._enough = asyncio.Event()

    async def run(
        self,
        first_step: int,
        steps: int,
        sequences: int,
        payload: Literal["weights", "gradient"],
        load: SharedVector,
        adam_step: int | None = None,
        on_progress: Any = None,
    ) -> messages.Done:
        seconds = steps * self.pace * (1 + self.noise * (self.dice.random() - 0.5))
        steps, seconds = await self._done_in(seconds, steps)
        if on_progress:
            on_progress(messages.Progress(first_step + steps - 1, math.nan, steps, seconds))
        with elsewhere():  # its workers are
            self.outbox.array[:] = load.array
            self.outbox.array[self.coordinate] -= 0.01 * steps
        self.steps_done += steps
        return messages.Done(0, steps, steps, first_step + steps, 1.0, 0)

    async def _done_in(self, seconds: float, steps: int) -> tuple[int, float]:
        """How many of the steps are done when it is enough, and the seconds that they took."""
        self._enough.clear()
        try:
            began = asyncio.get_running_loop().time()
            await asyncio.wait_for(self._enough.wait(), seconds)
        except TimeoutError:
            return steps, seconds
        done = min(steps, 1 + int(steps * (asyncio.get_running_loop().time() - began) / seconds))
        await asyncio.sleep(began + seconds * done / steps - asyncio.get_running_loop().time())
        return done, seconds * done / steps

    def enough(self) -> None:
        self._enough.set()

    async def evaluate(self, weights: SharedVector) -> float:
        with elsewhere():
            return float(weights.array.sum())


class MemoryFiles(MeanFiles):
    """Means of rounds on a simulated disk, of a model that is too small for most to say something of their bytes."""

    def __init__(self) -> None:
        self._kept: dict[int, Codes] = {}

    def keep(self, round: int, codes: Codes) -> None:
        self._kept[round] = codes

    def chunks(self, round: int) -> Iterator[tuple[int, bytes]]:
        if round not in self._kept:
            raise BadMessage("it is not here")
        yield from ((start, bytes(code)) for start, code in sorted(self._kept[round].items()))


@dataclass
class Disk:
    """What a node finds again after a crash."""

    checkpoint: Checkpoint | None = None
    state: OuterState | None = None
    commitments: Commitments | None = None
    proofs: MemoryProofs = field(default_factory=MemoryProofs)
    pairs: Records = field(default_factory=Records)
    means: MemoryFiles = field(default_factory=MemoryFiles)

    def load(self, round: int, node: str) -> Commitments:
        return (self.commitments or Commitments.fresh(round, node)).settled(round, node)

    def keep(self, commitments: Commitments) -> None:
        self.commitments = commitments


@dataclass
class PairDisk:
    """A journal of pairs on a disk."""

    disk: Disk

    def load(self) -> Records:
        return self.disk.pairs

    def keep(self, records: Records) -> None:
        self.disk.pairs = records


@dataclass
class Node:
    """One incarnation of a site."""

    carrier: SimCarrier
    roster: Roster
    rounds: Rounds | PairRounds
    trainer: FakeTrainer
    training: Training
    main: asyncio.Task[None]


@dataclass
class Cluster:
    """All sites, their disks, and what was ever committed."""

    config: RunConfig
    names: list[str]
    seed: int
    weather: Weather = field(default_factory=Weather)
    fail_at: dict[tuple[str, int, str], str] = field(default_factory=dict)
    """(node, round, phase) -> "stop" for ever or "restart" after a while."""
    founder: str = ""
    """Of a run of pairs, in which sites need standing; "": all have it."""

    def __post_init__(self) -> None:
        self.network = Network(self.seed, self.weather)
        self.length = max(LENGTH, len(self.names))
        self.witness = "witness" if self.config.run.witness else ""
        self.folder = TemporaryDirectory()
        self.disks = {name: Disk() for name in self.names}
        self.nodes: dict[str, Node] = {}
        self.committed: dict[int, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
        self.crashed: set[str] = set()
        self.paces = {name: 0.2 + self.network.random.random() for name in self.names}
        self.errors: list[BaseException] = []
        self.incarnations = iter(range(1 << 30))

    def boot(self, name: str) -> None:
        """Start a site, or start it again from its disk."""
        carrier = self.network.join(name)
        disk = self.disks[name]
        progress = Progress()

        def pulse() -> Pulse:
            state = rounds.state
            site = Site(node=name, name=name, address="sim")
            return Pulse(
                site=site,
                phase=progress.phase,
                round=state.round,
                digest=state.digest,
                inner_step=progress.inner_step,
                tokens_per_second=progress.tokens_per_second,
                training_for=progress.training_for,
                validation_loss=progress.validation_loss,
                spread=progress.spread,
                vouches=rounds.vouches if isinstance(rounds, PairRounds) else (),
            )

        roster = Roster(carrier, pulse)
        state = disk.checkpoint.state if disk.checkpoint else self.beginning()
        if disk.state and disk.state.round > state.round:
            state = disk.state
        with elsewhere():  # as the daemon does
            _ = state.digest, state.norm
        atomic, pairs = self._rounds_of(name, carrier, roster, state), None
        if self.config.outer.algorithm == "noloco":
            pairs = self._pairs_of(name, carrier, roster, state)
        rounds = pairs or atomic
        means = self._means_of(name)
        StateServer(
            carrier,
            lambda number, shadow: (atomic if shadow else rounds).offer(number, shadow),
            atomic.prove,
            means.chunks,
        )
        dice = random.Random(f"{self.seed} {name}")
        trainer = FakeTrainer(self.names.index(name), self.paces[name], dice, self.length)
        layout: Any = TinyLayout(self.length)
        peers = Peers(carrier, roster, self.length, self._faults(name), means)
        agreement: Agreement = OfAll(atomic, peers)
        if pairs:
            merging = atomic if self.config.outer.final_merge else None
            agreement = InPairs(pairs, peers, progress, self._keeping(name), merging)
        loop = Training(self.config, layout, agreement, trainer, progress, self._saver(name))
        if disk.checkpoint:
            with elsewhere():
                loop.restore(disk.checkpoint)
        for other in self.names:
            roster.add(Site(node=other, name=other, address="sim"))
        for contact in roster.contacts.values():
            assert contact.task
            carrier.tasks.add(contact.task)
        if isinstance(rounds, Rounds):
            carrier.spawn(rounds.run())
        main = carrier.spawn(self._live(loop, roster))
        self.nodes[name] = Node(carrier, roster, rounds, trainer, loop, main)

    def _pairs_of(self, name: str, carrier: SimCarrier, roster: Roster, state: OuterState) -> PairRounds:
        outer, disk = self.config.outer, self.disks[name]
        standing = Standing(roster, self.founder, PlainStatements(name), self.network.random)
        place = carrier, roster, standing, PairDisk(disk)
        tools = PairTools(*place, outer.noloco, codec(outer.codec), self._faults(name), CHUNK)
        tools.weighing = partial(weighing, self.config)
        return PairRounds(tools, self.seed, total_rounds(self.config), state, self._nonces())

    def _rounds_of(self, name: str, carrier: SimCarrier, roster: Roster, state: OuterState) -> Rounds:
        disk, lossy = self.disks[name], codec(self.config.outer.codec)
        fetch = shadow_fetcher(carrier, self.length, 10.0)
        signed = PlainStatements(name, self.witness)
        tools = Tools(
            carrier, roster, signed, disk, disk.proofs, self._keeping(name), fetch, self._faults(name), lossy, CHUNK
        )
        tools.means = self._means_of(name)
        tools.ask_witness = partial(self._ask_witness, name) if self.witness else None
        return Rounds(tools, state, lambda number: synced(self.config, number, self.length), self._nonces())

    async def _ask_witness(self, name: str, request: WitnessRequest) -> WitnessReply:
        """Ask a witness that has just been started again; its answer may be lost."""
        await asyncio.sleep(self.network.random.random())
        with elsewhere():
            file = Path(self.folder.name) / WITNESS_FILE
            if not file.exists():
                first = self.beginning()
                told = {"round": 0, "digest": first.digest.hex(), "members": [*first.members], "heir": ""}
                file.write_bytes(durable.seal(told))
            statements = PlainStatements(self.witness, self.witness)
            reply = Witness(file, self.witness, statements).answer(name, request, founder="")
        if self.network.random.random() < WITNESS_LOSS:
            raise PeerLost(self.witness, "lost by the weather")
        return reply

    def _means_of(self, name: str) -> Means:
        layout: Any = TinyLayout(self.length)
        return Means(self.config, layout, self.disks[name].means)

    def _nonces(self) -> Callable[[], bytes]:
        counter, incarnation = iter(range(1 << 30)), next(self.incarnations)
        return lambda: f"{incarnation:08d}{next(counter):08d}".encode()

    def beginning(self) -> OuterState:
        """Round 0: made by the first site alone, known to all."""
        tensors = {name: SharedVector(self.length) for name in (ANCHOR, MOMENTUM)}
        return OuterState(0, tuple(self.names), tensors, {})

    def crash(self, name: str) -> None:
        self.crashed.add(name)
        self.nodes.pop(name, None)
        self.network.crash(name)

    async def settle(self, names: list[str], within: float) -> None:
        """Wait until these sites have finished their run.

        Raises:
            TimeoutError: they have not, or they lack a quorum and stood still for a sixtieth of that time.
        """
        commits, still = 0, 0.0
        async with asyncio.timeout(within):
            while not all(name in self.nodes and self.nodes[name].main.done() for name in names):
                if self.errors:
                    raise self.errors[0]
                await asyncio.sleep(10.0)
                committed = sum(len(found) for found in self.committed.values())
                commits, still = committed, still + 10.0 if committed == commits else 0.0
                if still > within / 60 and not has_quorum(names, self.base(names)):
                    raise TimeoutError

    def furthest(self, names: list[str]) -> OuterState:
        """The latest state that any of these sites holds."""
        states = [self.nodes[name].rounds.state for name in names if name in self.nodes]
        return max(states, key=lambda state: state.round)

    def base(self, names: list[str]) -> Base:
        """Whose votes decide the round after that state."""
        return Base(self.furthest(names).members, witness=self.witness)

    async def _live(self, loop: Training, roster: Roster) -> None:
        try:
            await run_work(loop, roster, Orders())
        except (asyncio.CancelledError, GeneratorExit):  # the power cut
            raise
        except BaseException as error:
            self.errors.append(error)
            raise

    def _saver(self, name: str) -> Any:
        async def save(checkpoint: Checkpoint, kept: Awaitable[object]) -> None:
            await kept
            state = checkpoint.state
            self.committed[state.round][name].add(state.digest)
            self.disks[name].checkpoint = checkpoint
            if isinstance(rounds := self.nodes[name].rounds, PairRounds):
                rounds.saved = max(rounds.saved, state.round)

        return save

    def _keeping(self, name: str) -> Any:
        async def keep(state: OuterState) -> None:
            self.disks[name].state = state
            if name in self.nodes and isinstance(rounds := self.nodes[name].rounds, PairRounds):
                rounds.saved = state.round
            else:
                self.committed[state.round][name].add(state.digest)

        return keep

    def _faults(self, name: str) -> Faults:
        async def strike(round: int, phase: str) -> None:
            fate = self.fail_at.pop((name, round, phase), None)
            if fate is None:
                return
            asyncio.get_running_loop().call_soon(self.crash, name)
            if fate == "restart":
                asyncio.get_running_loop().call_later(20 * self.network.random.random(), self.boot, name)
            await asyncio.Event().wait()

        return Faults(strike)


def digests_by_round(cluster: Cluster) -> dict[int, set[bytes]]:
    """Every digest that anybody committed, by round: one each, or the run has forked."""
    return {number: set().union(*by_node.values()) for number, by_node in cluster.committed.items()}


__all__ = ["LENGTH", "Cluster", "Layout", "digests_by_round"]
