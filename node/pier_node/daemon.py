"""The daemon: puts a site's parts together, starts them, and stops them when the run, or the user, is done."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from pier.v1.peer_pb2 import Ballot, Phase, Site
from pier_node import durable
from pier_node.checkpoint import Checkpoint, CheckpointStore
from pier_node.faults import NO_FAULTS, kill_at
from pier_node.inner.moments import Moments
from pier_node.inner.workers import Workers
from pier_node.join import Reception, Settings, find_run, free_slot
from pier_node.journal import Journal
from pier_node.leave import Leave
from pier_node.model.layout import Layout
from pier_node.newcomer import beginning, from_peers
from pier_node.outer.attempt import Tools, Voted
from pier_node.outer.round import Rounds
from pier_node.outer.schedule import total_rounds
from pier_node.progress import Progress
from pier_node.report import Reporter, Status
from pier_node.roster import Roster
from pier_node.shared import SharedVector
from pier_node.site import DAEMON_FILE, EVENTS_FILE, SiteRecord, claim
from pier_node.status import StatusServer, finite
from pier_node.training import SILENCE, Training
from pier_node.wire.address import format_address, parse_address
from pier_node.wire.carrier import HELLO
from pier_node.wire.grpc_carrier import GrpcCarrier
from pier_node.wire.interfaces import choose_address
from pier_node.wire.probe import ProbeServer
from pier_node.wire.state_server import StateServer
from pier_node.wire.transfer import shadow_fetcher

LAST_ATTEMPT = 4.0
"""Seconds that an attempt under way gets to end when this site is told to stop."""
GOSSIP = 15.0
"""Seconds between two rounds of hellos, which bring rosters together."""
LINGER = 120.0
"""Seconds that a finished site waits for others that still need its last state."""

log = logging.getLogger(__name__)


class Daemon:
    """One site of a run.

    Args:
        say: tells the user something worth reading.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None] = print) -> None:
        self._settings, self._say = settings, say
        self._stopping = asyncio.Event()
        self._progress = Progress()
        self._rounds: Rounds | None = None
        self._helpers: list[asyncio.Task[None]] = []

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Leave the run and end `run`, within seconds."""
        self._stopping.set()

    async def run(self) -> None:
        """Take part in the run until it is finished or `stop` is called. Raises PierError when it cannot go on."""
        work = asyncio.create_task(self._live())
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        await self._end_of_attempt(work)
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _end_of_attempt(self, work: asyncio.Task[None]) -> None:
        """Others count on a site that is in the middle of an attempt with them: it leaves when that has ended."""
        if self._rounds is None or work.done():
            return
        rest = asyncio.create_task(self._rounds.at_rest())
        await asyncio.wait([work, rest], timeout=LAST_ATTEMPT, return_when=asyncio.FIRST_COMPLETED)
        rest.cancel()

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            await self._join(stack)
            training = await self._prepare(stack)
            await self._guarded(training.run())
            self._say(f"The run is finished: {total_rounds(self._member.config)} rounds.")
            await self._linger()

    # --- coming in -----------------------------------------------------------------------------

    async def _join(self, stack: AsyncExitStack) -> None:
        """Listen, find the others, take a slot, and let this machine ask for our status."""
        settings = self._settings
        settings.folder.mkdir(parents=True, exist_ok=True)
        stack.callback(claim(settings.folder).close)
        member = self._member = await find_run(settings)
        self._carrier = GrpcCarrier(member.identity.node, member.config.hash(), member.credentials)
        self._site = Site(node=member.identity.node, name=settings.name or socket.gethostname())
        self._reporter = Reporter(member.config, self._site, self._carrier, self._progress)
        self._roster = Roster(self._carrier, self._reporter.pulse)
        reception = Reception(self._carrier, self._roster, member.config, lambda: self._site)
        self._carrier.serve(HELLO, reception.answer)
        ProbeServer(self._carrier, member.config.hash())
        host, port = parse_address(settings.listen)
        port = await self._carrier.start(host, port)
        stack.push_async_callback(self._carrier.stop)
        stack.push_async_callback(self._roster.stop)
        choice = choose_address(list(settings.peers), settings.advertise, format_address(host, port))
        self._site.address = choice.address
        self._say(choice.why)
        await self._serve_status(stack)
        record = member.record or SiteRecord(founder=not settings.peers, slot=0)
        for site in record.sites():
            self._roster.add(site)
        await reception.introduce([*settings.peers, *(site.address for site in record.sites())])
        self._record = record if member.record else replace(record, slot=self._first_slot(record))
        self._site.slot = self._record.slot
        self._save_record()
        self._background(stack, self._gossip(reception))
        if self._record.founder:
            self._say(self._invitation())

    def _first_slot(self, record: SiteRecord) -> int:
        return 0 if record.founder else free_slot(self._roster, self._member.config.run.sites)

    def _invitation(self) -> str:
        proof = f"--token {self._member.token}" if self._member.token else "--insecure"
        return f"To join from another machine:\n\n  pier-node start --peers {self._site.address} {proof}\n"

    async def _serve_status(self, stack: AsyncExitStack) -> None:
        server = StatusServer(self.status)
        port = await server.start(self._settings.http)
        stack.push_async_callback(server.stop)
        path = self._settings.folder / DAEMON_FILE
        durable.replace(path, json.dumps({"pid": os.getpid(), "http": f"http://127.0.0.1:{port}"}).encode())
        stack.callback(path.unlink, missing_ok=True)

    async def _gossip(self, reception: Reception) -> None:
        while True:
            await asyncio.sleep(GOSSIP)
            await reception.introduce([contact.site.address for contact in self._roster.contacts.values()])
            self._save_record()

    def _save_record(self) -> None:
        self._record = self._record.with_peers(contact.site for contact in self._roster.contacts.values())
        self._record.save(self._settings.folder)

    # --- getting ready -------------------------------------------------------------------------

    async def _prepare(self, stack: AsyncExitStack) -> Training:
        """Bring up workers and state; from here on this site is a member."""
        config, folder, node = self._member.config, self._settings.folder, self._carrier.node
        layout = await asyncio.to_thread(Layout.of, config.model)
        self._workers = Workers(config, node, self._record.slot, self._settings.data, folder, self._settings.workers)
        starting = asyncio.create_task(self._workers.start())
        stack.push_async_callback(self._workers.stop)
        stack.callback(starting.cancel)
        self._store = CheckpointStore(folder / "checkpoints", config.hash())
        await self._roster.settled()
        checkpoint = await asyncio.to_thread(self._store.newest)
        resumed = checkpoint is not None
        if checkpoint is None and self._record.founder:
            checkpoint = await asyncio.to_thread(beginning, config, layout, node)
        if checkpoint is None:
            self._progress.phase = Phase.PHASE_CATCHING_UP
            checkpoint = await from_peers(config, layout, self._carrier, self._roster)
        await asyncio.to_thread(lambda: checkpoint.state.digest)
        training = self._member_of_rounds(stack, layout, checkpoint)
        await starting
        if checkpoint.state.round == 0 and config.inner.eval_every:
            await training.validate()
            self._write_event()
        self._say(f"{'Going on' if resumed else 'Starting'} at round {checkpoint.state.round} as {self._name()}.")
        return training

    def _member_of_rounds(self, stack: AsyncExitStack, layout: Layout, checkpoint: Checkpoint) -> Training:
        folder = self._settings.folder
        faults = kill_at(self._settings.fail_at) if self._settings.fail_at else NO_FAULTS
        journal = Journal(folder / "journal.json")
        vote = journal.last()
        voted = None
        if vote and vote.round > checkpoint.state.round:
            ballot = Ballot(number=vote.ballot_number, keeper=vote.ballot_keeper)
            voted = Voted(vote.round, ballot, vote.value, None)
        tools = Tools(
            self._carrier, self._roster, journal, shadow_fetcher(self._carrier, layout.length, SILENCE), faults
        )
        rounds = self._rounds = self._reporter.rounds = Rounds(tools, checkpoint.state, voted)
        StateServer(self._carrier, rounds.offer, self._moments)
        leave = Leave(self._carrier, self._roster, rounds, folder / "votes.json")
        leave.restore()
        stack.push_async_callback(self._leave, leave)
        training = Training(
            self._member.config,
            layout,
            self._carrier,
            self._roster,
            rounds,
            self._workers,
            self._progress,
            self._committed,
            faults,
        )
        training.restore(checkpoint)
        self._workers.recover_moments = self._saved_moments
        stack.callback(self._save_pending, training)
        self._background(stack, rounds.keeper.run())
        return training

    async def _leave(self, leave: Leave) -> None:
        if self._progress.phase != Phase.PHASE_DONE:
            self._progress.phase = Phase.PHASE_LEAVING
            await leave.leave()

    def _moments(self) -> tuple[SharedVector, SharedVector, int] | None:
        workers = self._workers
        return (workers.adam_m, workers.adam_v, workers.adam_step) if workers.adam_step else None

    def _saved_moments(self) -> Moments | None:
        saved = self._store.newest()
        if saved is None or saved.adam_m is None or saved.adam_v is None:
            return None
        return saved.adam_m.array, saved.adam_v.array, saved.adam_step

    # --- while it runs -------------------------------------------------------------------------

    async def _committed(self, checkpoint: Checkpoint) -> None:
        """After each round: a checkpoint, and a line for whoever reads along."""
        await asyncio.to_thread(self._store.save, checkpoint)
        self._write_event()
        loss = f", validation loss {self._progress.validation_loss:.4f}"
        fresh = self._progress.validated_round == checkpoint.state.round
        log.info(
            "round %d committed by %d%s", checkpoint.state.round, len(checkpoint.state.members), loss if fresh else ""
        )

    def _write_event(self) -> None:
        event = {"time": time.time(), **self.status()}
        event.pop("peers")
        with (self._settings.folder / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(finite(event)) + "\n")

    def _save_pending(self, training: Training) -> None:
        """What no round has taken yet is not lost by stopping."""
        if self._progress.phase == Phase.PHASE_WAITING:
            self._store.save(training.snapshot())

    def status(self) -> Status:
        """Everything that `pier-node status` shows."""
        return self._reporter.status(self._roster)

    def _name(self) -> str:
        return f"{self._site.name} ({self._carrier.node})"

    async def _linger(self) -> None:
        """Stay until nobody alive needs our last state any more."""
        last = total_rounds(self._member.config)

        def needed() -> bool:
            pulses = [self._roster.pulse_of(node) for node in self._roster.contacts if self._roster.alive(node)]
            return any(pulse is not None and pulse.round < last for pulse in pulses)

        try:
            async with asyncio.timeout(LINGER):
                await self._roster.changed.until(lambda: not needed())
        except TimeoutError:
            log.warning("some sites have not finished; they can go on from the checkpoints of those that have")

    def _background(self, stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._helpers.append(task)
        stack.callback(task.cancel)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; an error in the background ends it too, and is raised."""
        main = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait([main, *self._helpers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            main.cancel()
            await asyncio.wait([main])
