"""The daemon of a site: builds its parts, starts them, and stops them when the run is finished or the user stops it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.shared import Vector
from pier_node.base.tasks import Background, first_of
from pier_node.base.toml import read_toml, validated
from pier_node.config.run import RunConfig
from pier_node.engine.messages import Logged
from pier_node.engine.metrics import newest
from pier_node.engine.program import Program
from pier_node.engine.supervisor import Moments
from pier_node.gossip.pairs import Pairs
from pier_node.identity.node import Token
from pier_node.identity.signing import Signer
from pier_node.outer.advance import get_ready
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import total_rounds
from pier_node.outer.state import ANCHOR, OuterState
from pier_node.rounds.certificate import alone
from pier_node.rounds.double_votes import Convicted
from pier_node.rounds.folder import DAEMON_FILE, SiteRecord, claim, unwritable
from pier_node.rounds.member import Rounds
from pier_node.rounds.progress import Progress
from pier_node.rounds.progress_checks import Trust
from pier_node.rounds.proofs import PROOFS_FILE, Proofs
from pier_node.rounds.roster import Roster, sign_entry
from pier_node.rounds.state_store import CHECKPOINTS, Checkpoint, StateStore
from pier_node.rounds.statements import SignedStatements
from pier_node.site.agreement import Agreement, InPairs, OfAll, Peers
from pier_node.site.bootstrap import beginning, first_trust, from_peers
from pier_node.site.coordinator.client import Coordination
from pier_node.site.join import Reception, check_start, find_run, free_slot
from pier_node.site.leave import Leave, linger
from pier_node.site.loop import run_work
from pier_node.site.member import Footing, pairs_of_two, rounds_of_all
from pier_node.site.orders import Orders
from pier_node.site.report import Reporter, Status, name_in_logs, tell_of_missing
from pier_node.site.settings import Settings
from pier_node.site.status import StatusServer
from pier_node.site.trackers import Trackers, Who
from pier_node.site.training import Training
from pier_node.trainer.data.corpus import SiteData
from pier_node.trainer.workers import Workers
from pier_node.wire.carrier import HELLO
from pier_node.wire.probe import ProbeServer
from pier_node.wire.state_server import StateServer
from pier_node.wire.transport import make_carrier
from pier_proto.v1.peer_pb2 import DoubleVote, Link, Phase, Site

if TYPE_CHECKING:
    from pier_node.site.pipeline_training import PipelineTraining

LAST_ATTEMPT = 4.0
"""Seconds that a running attempt gets to finish when this site is told to stop."""
FOLLOW_SECONDS = 30.0
"""How long a program's daemon waits for the one before it to leave the folder."""
STATES = "states"
"""Folder of the committed states that other sites rely on."""
GOSSIP = 15.0
"""Seconds between two rounds of hellos, which synchronise rosters."""

log = logging.getLogger(__name__)


class Daemon:
    """One site of a run.

    Args:
        say: prints a message for the user.
        on_terminal: messages go to a terminal and not to a log, so they may contain the run's token.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None] = print, on_terminal: bool = False) -> None:
        self._settings, self._say, self._on_terminal = settings, say, on_terminal
        self._stopping = asyncio.Event()
        self._progress = Progress()
        self._rounds: Rounds | Pairs | None = None
        self._coordination: Coordination | None = None
        self._orders = Orders()
        self._program: Program | None = None
        self._workers: Workers | Program
        self._background = Background()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Leave the run and end `run` within seconds. Ctrl+C and SIGTERM call it: see commands/daemon.py."""
        self._stopping.set()

    async def run(self) -> None:
        """Take part in the run until it is finished or `stop` is called.

        Raises PierError when the site cannot continue.
        """
        await first_of(self._live(), self._until_it_may_leave())

    async def _until_it_may_leave(self) -> None:
        """Return once `stop` was called and no attempt is under way: other members rely on this site in it."""
        await self._stopping.wait()
        if self._rounds is not None:
            await first_of(self._rounds.at_rest(), asyncio.sleep(LAST_ATTEMPT))

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                await self._join(stack)
                piped = self._member.config.pipeline.stages > 1
                training = await (self._prepare_stage(stack) if piped else self._prepare(stack))
                await self._background.guard(self._work(training))
                await linger(self._member.config, self._roster)
            except PierError as error:
                if self._program:
                    self._program.refuse(error)
                raise

    async def _work(self, training: Training | PipelineTraining) -> None:
        """Train the run, and then experts if they are ordered."""
        await run_work(training, self._roster, self._orders)
        if isinstance(training, Training):
            await asyncio.to_thread(self._save_rest, training)
            if self._program and self._rounds:
                await self._program.finish(self._rounds.state.tensors[ANCHOR])
        self._say(f"The run is finished: {total_rounds(self._member.config)} rounds.")
        if isinstance(training, Training) and self._coordination and self._coordination.orders.experts:
            from pier_node.site.experts import train_experts  # with torch, which a daemon does without otherwise

            await self._workers.stop()
            seed, of_site = training.snapshot().state, (self._coordination, self._progress, self._roster)
            folder = await train_experts(self._member.config, self._settings, seed, *of_site)
            self._say(f"The experts are trained. This site's experts are in {folder}.")

    # --- joining -------------------------------------------------------------------------------

    async def _join(self, stack: AsyncExitStack) -> None:
        """Listen, find the other sites, take a slot, and serve this site's status on this machine."""
        if self._settings.has_program:
            self._settings = await self._attach_program(stack)
        settings = self._settings
        await asyncio.to_thread(check_start, settings)
        stack.callback((await self._claimed()).close)
        member = self._member = await find_run(settings)
        if self._program:
            self._program.check(member.config)
        settings = self._settings = settings.after(member.record)
        node, run_hash = member.identity.node, member.config.hash()
        self._carrier = make_carrier(member.transport, node, run_hash, member.credentials, settings.folder)
        self._site = Site(node=node, name=settings.name or member.name or socket.gethostname())
        signer = self._signer = Signer(member.identity, run_hash)
        self._statements = SignedStatements(signer)
        self._reporter = Reporter(member.config, self._site, self._carrier, self._progress)
        self._roster = Roster(self._carrier, self._reporter.pulse, signer=signer)
        name_in_logs(self._roster.called)
        stack.push_async_callback(self._carrier.stop)
        stack.push_async_callback(self._roster.stop)
        known = await self._place(stack)
        revoked = self._coordination.revoked if self._coordination else None
        self._proofs = await asyncio.to_thread(Proofs, settings.folder / PROOFS_FILE)
        self._convicted = Convicted(settings.folder, self._statements, self._proofs, self._bar)
        self._convicted.restore()
        put_out = self._convicted, revoked
        reception = Reception(self._carrier, self._roster, member.config, lambda: self._site, *put_out)
        self._carrier.serve(HELLO, reception.answer)
        ProbeServer(self._carrier, run_hash, self._roster.address)
        record = known or SiteRecord(not settings.peers, slot=0, transport=member.transport)
        peers = [*settings.peers, *(site.address for site in record.sites())]
        choice = await self._carrier.listen(settings.listen, settings.advertise, peers)
        self._site.address = choice.address
        self._sign_entry(record)
        self._say(choice.why)
        await self._serve_status(stack)
        for site in record.sites():
            self._roster.add(site, participant=True)
        await reception.introduce(peers)
        slot = record.slot if known or record.founder else free_slot(self._roster, member.config.run.sites)
        founder = member.founder or record.founded_by
        self._record = replace(settings.noted(record), slot=slot, name=self._site.name, founded_by=founder)
        self._site.slot = slot
        self._sign_entry(record)
        self._data = SiteData.of(member.config, slot, self._settings.data, self._settings.shared_data)
        self._say(self._describe_training())
        self._save_record()
        self._background.start(stack, self._gossip(reception, peers))
        self._background.start(stack, tell_of_missing(self._reporter, self._roster))
        if self._coordination:
            self._background.start(stack, self._coordination.client.run())
            self._background.start(stack, self._coordination.sample())
        if self._record.founder and member.enrolment is None:
            kept = None if self._on_terminal else Token.path(settings.folder).absolute()
            self._say(member.invitation(self._site.address, kept))

    async def _claimed(self) -> IO[bytes]:
        """The folder, for this daemon alone. The last daemon of a program that was started again may still leave it."""
        deadline = time.monotonic() + (FOLLOW_SECONDS if self._settings.program_socket else 0.0)
        while True:
            try:
                return claim(self._settings.folder)
            except PierError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _attach_program(self, stack: AsyncExitStack) -> Settings:
        """Wait for the training program; with the run that it founds, if it does. Raises PierError."""
        settings = self._settings
        program = self._program = Program(settings.program_socket, settings.command)
        stack.push_async_callback(program.stop)
        attach = await program.attached()
        given = "" if settings.peers or settings.coordinator else attach.config  # then it is not for it to say
        tables = read_toml(settings.run, "pier-node init") if settings.run else json.loads(given or "null")
        if tables is None:
            return settings
        tables["program"] = {"step_tokens": attach.step_tokens, "tensors": attach.tensors}
        return replace(settings, run=None, founding=validated(tables, RunConfig, "the run of the training program"))

    def _describe_training(self) -> str:
        """One sentence for the site's owner."""
        config = self._member.config
        if config.program:
            return f"This site trains a model of its own program: {Layout.of_run(config).length:,} parameters."
        return self._data.describe(config)

    def _sign_entry(self, record: SiteRecord) -> None:
        """Sign this site's roster entry with a version newer than any before, whatever the clock says."""
        newest = max(int(time.time() * 1000), record.version + 1, self._site.version + 1)
        sign_entry(self._site, self._signer, newest)

    async def _place(self, stack: AsyncExitStack) -> SiteRecord | None:
        """This site's record; with a coordinator, updated with what the coordinator knows.

        None: there is no record yet.
        """
        member, settings = self._member, self._settings
        if member.enrolment is None:
            return member.record
        self._coordination = Coordination(member, settings, self._reporter, self._carrier, self._roster, self.stop)
        self._orders = self._coordination.orders
        stack.push_async_exit(self._coordination.close)
        return await self._coordination.enter(member.record)

    async def _serve_status(self, stack: AsyncExitStack) -> None:
        server = StatusServer(self.status)
        port = await server.start(self._settings.http)
        stack.push_async_callback(server.stop)
        path = self._settings.folder / DAEMON_FILE
        try:
            durable.replace(path, json.dumps({"pid": os.getpid(), "http": f"http://127.0.0.1:{port}"}).encode())
        except OSError as error:
            raise unwritable(self._settings.folder, error) from error
        stack.callback(path.unlink, missing_ok=True)

    async def _gossip(self, reception: Reception, peers: list[str]) -> None:
        """Repeat the hello to all known sites and to the given peers, some of which may not have answered at first."""
        while True:
            await asyncio.sleep(GOSSIP)
            await reception.introduce([*peers, *self._roster.reached_at()])
            try:
                self._save_record()
            except PierError as error:  # the previous peers are good enough
                log.warning("%s", error.problem)

    def _save_record(self) -> None:
        self._record = replace(self._record.with_peers(self._roster.known()), version=self._site.version)
        self._record.save(self._settings.folder)

    # --- preparation ---------------------------------------------------------------------------

    async def _prepare(self, stack: AsyncExitStack) -> Training:
        """Start the workers and load or fetch the state. From here on this site is a member."""
        config, folder, node = self._member.config, self._settings.folder, self._carrier.node
        layout = Layout.of_run(config)
        key = f"{config.hash().hex()[:16]}-{node}"
        self._trackers = Trackers.of(folder, Who(config.run.name, self._site.name, key))
        stack.push_async_callback(asyncio.to_thread, self._trackers.close)
        if self._program:
            self._workers = self._program
            standing = partial(self._reporter.standing, self._roster)
            self._program.place(config, self._site.slot, folder, standing, self._log)
        else:
            self._workers = Workers(config, node, self._data, folder, self._settings.workers)
            stack.push_async_callback(self._workers.stop)
        starting = asyncio.create_task(self._workers.start())
        stack.callback(starting.cancel)
        if self._program:
            await starting  # a founder begins with its weights
        await asyncio.to_thread(get_ready, config)
        self._states = StateStore(folder / STATES, config.hash())
        self._checkpoints = StateStore(folder / CHECKPOINTS, config.hash(), shares=self._states)
        await self._roster.settled()
        checkpoint = await asyncio.to_thread(self._checkpoints.newest)
        how = "Resuming" if checkpoint else "Starting"
        if checkpoint is None:
            checkpoint = await self._first(layout)
            await self._keep(checkpoint.state)
        kept = await asyncio.to_thread(self._states.after, checkpoint.state.round)
        state = kept or checkpoint.state
        self._roster.keep(state.members)
        await asyncio.to_thread(lambda: (state.digest, state.norm))
        training = await self._member_of_rounds(stack, layout, checkpoint, state)
        await starting
        if checkpoint.state.round == 0 and config.inner.eval_every:
            await training.validate(checkpoint.state)
            self._note(checkpoint.state)
        self._say(f"{how} at round {checkpoint.state.round} as {self._site.name} ({node}).")
        return training

    async def _first(self, layout: Layout) -> Checkpoint:
        """The first checkpoint of a site that has none on disk."""
        config = self._member.config
        kept = await asyncio.to_thread(self._states.after, -1)
        if kept:
            return Checkpoint(kept)
        if self._record.founder:
            weights = await asyncio.to_thread(self._given_weights)
            checkpoint = await asyncio.to_thread(beginning, config, layout, self._carrier.node, weights)
            proof: Sequence[Link] = [alone(checkpoint.state, b"", self._statements)]
        else:
            self._progress.phase = Phase.PHASE_CATCHING_UP
            checkpoint, proof = await from_peers(config, layout, self._carrier, self._roster, self._first_trust)
        await asyncio.to_thread(self._proofs.add, proof)
        return checkpoint

    def _given_weights(self) -> Vector | None:
        """The weights to found a run from, if they are not those of its seed. Raises PierError."""
        if self._program:
            return self._program.outbox.array
        if self._settings.weights is None:
            return None
        from pier_node.trainer.model.export import import_weights  # with torch, which the daemon otherwise avoids

        _, flat = import_weights(self._settings.weights)
        self._say(f"The run starts from the weights in {self._settings.weights}.")
        weights: Vector = flat.numpy()
        return weights

    def _first_trust(self) -> Trust | None:
        """What this site trusts before it has a state. None in a run of pairs, where each site has its own state."""
        in_pairs = self._member.config.outer.algorithm == "noloco"
        return None if in_pairs else first_trust(self._settings.trust, self._record.founded_by, self._statements)

    def _bar(self, nodes: Iterable[str], why: str) -> None:
        self._roster.bar(nodes, why)
        self._carrier.refuse(nodes, why)

    async def _prepare_stage(self, stack: AsyncExitStack) -> PipelineTraining:
        """Prepare a site that holds a stage of the model: see site/pipeline.py."""
        from pier_node.site.pipeline import Ground, prepare  # it computes in this process: PyTorch comes with it

        committed = self._coordination.recorder.round if self._coordination else lambda _state, _lines: None
        of_site = self._roster, self._reporter, self._record, self._orders, committed, self._proofs, self._convict
        site = await prepare(
            Ground(self._member.config, self._settings, self._carrier, self._statements, *of_site), stack
        )
        self._rounds = site.rounds
        self._background.start(stack, site.rounds.run())
        self._leave_politely(stack, site.rounds)
        return site.training

    async def _member_of_rounds(
        self, stack: AsyncExitStack, layout: Layout, checkpoint: Checkpoint, state: OuterState
    ) -> Training:
        """Build the site's part in the run from `state`: the checkpoint's, or a later one kept without a checkpoint."""
        settings, statements = self._settings, self._statements
        config, keep = self._member.config, self._keep
        disk = settings.folder, self._proofs
        site = Footing(config, self._carrier, self._roster, statements, *disk, self._convict, settings.faults)
        of_all = rounds_of_all(site, keep, layout.length, state)
        peers = Peers(site.carrier, site.roster, layout.length, site.faults)
        agreement: Agreement
        in_pairs = config.outer.algorithm == "noloco"
        if in_pairs:
            pairs, merging = pairs_of_two(site, state), of_all if config.outer.final_merge else None
            stack.push_async_callback(pairs.stop)
            agreement = InPairs(pairs, peers, self._progress, keep, merging)
        else:
            self._background.start(stack, of_all.run())
            agreement = OfAll(of_all, peers)
        self._rounds = self._reporter.rounds = agreement.rounds
        self._serve_states(agreement.rounds, of_all)
        self._leave_politely(stack, None if in_pairs else of_all)
        training = Training(config, layout, agreement, self._workers, self._progress, self._committed)
        await asyncio.to_thread(training.restore, checkpoint)
        self._workers.recover_moments = self._saved_moments
        stack.push_async_callback(asyncio.to_thread, self._save_rest, training)
        return training

    def _convict(self, proof: DoubleVote) -> None:
        self._convicted.take([proof])

    def _serve_states(self, rounds: Rounds | Pairs, of_all: Rounds) -> None:
        """Serve states to peers. In a run of pairs each site has its own state; only the merged model is voted on."""

        def offer(number: int, shadow: bool) -> OuterState | None:
            return (of_all if shadow else rounds).offer(number, shadow)

        StateServer(self._carrier, offer, self._workers.moments, of_all.prove)

    def _leave_politely(self, stack: AsyncExitStack, rounds: Rounds | None) -> None:
        stack.push_async_callback(self._leave, Leave(self._carrier, self._roster, rounds))

    async def _leave(self, leave: Leave) -> None:
        if self._progress.phase != Phase.PHASE_DONE:
            self._progress.phase = Phase.PHASE_LEAVING
            await leave.leave()

    # --- running -------------------------------------------------------------------------------

    async def _committed(self, checkpoint: Checkpoint) -> None:
        await asyncio.to_thread(self._checkpoints.save, checkpoint)
        self._saved(checkpoint.state)
        self._note(checkpoint.state)
        if self._coordination:
            self._coordination.recorder.round(checkpoint.state)
        self._roster.keep(checkpoint.state.members)
        loss, state = f", validation loss {self._progress.validation_loss:.4f}", checkpoint.state
        fresh = self._progress.validated_round == state.round
        self._trackers.told(self._progress, self.status())
        log.info("round %d committed by %d%s", state.round, len(state.members), loss if fresh else "")

    def _log(self, logged: Logged) -> None:
        """Take note of metrics of the program's own."""
        self._progress.metrics = newest(self._progress.metrics, logged.metrics)
        self._trackers.logged(logged.metrics, logged.step)

    async def _keep(self, state: OuterState) -> None:
        """Store a committed state, before this site announces that it has it. Raises PierError."""
        await asyncio.to_thread(self._states.keep, state)
        self._saved(state)

    def _saved(self, state: OuterState) -> None:
        """Take note that from now on this state would survive a power cut."""
        if isinstance(self._rounds, Pairs):
            self._rounds.saved = max(self._rounds.saved, state.round)

    def _save_rest(self, training: Training) -> None:
        """Save what stopping would lose: the unsent update, and a state that was just committed or fetched."""
        if not training.resting:
            return
        rest = training.snapshot()
        newest = self._checkpoints.peek()
        if self._progress.phase != Phase.PHASE_DONE or newest is None or newest[1]["round"] != rest.state.round:
            self._checkpoints.save(rest)

    def _saved_moments(self) -> Moments | None:
        """AdamW's moments in the newest checkpoint."""
        saved = self._checkpoints.newest()
        return saved.moments if saved else None

    def _note(self, state: OuterState) -> None:
        self._reporter.note(self._settings.folder, state, self._roster)

    def status(self) -> Status:
        """Everything that `pier-node status` shows."""
        return self._reporter.status(self._roster)
