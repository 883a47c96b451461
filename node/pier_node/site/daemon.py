"""The daemon of a site: joins the run, starts the site's part in it, and stops when the run is done or it is told to.

What a site does in a run of replicas is in replica.py, what it does in a pipeline in pipeline.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.base.processes import ticks_of
from pier_node.base.tasks import Background, first_of
from pier_node.base.toml import read_toml, validated
from pier_node.base.units import several
from pier_node.config.run import RunConfig
from pier_node.engine.program import Program
from pier_node.engine.training_process import Command
from pier_node.identity.node import Signer, Token
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import total_rounds
from pier_node.rounds.double_votes import Convicted
from pier_node.rounds.folder import DAEMON_FILE, SiteRecord, claim, require_claimed, unwritable
from pier_node.rounds.progress import Progress
from pier_node.rounds.proofs import PROOFS_FILE, Proofs
from pier_node.rounds.roster import Roster, sign_entry
from pier_node.rounds.statements import SignedStatements
from pier_node.site.coordinator.client import Coordination
from pier_node.site.join import Membership, Reception, check_port, check_start, find_run, free_slot
from pier_node.site.loop import run_work
from pier_node.site.membership import Joined
from pier_node.site.replica import Replica, prepare
from pier_node.site.report import Reporter, StatusServer, name_in_logs, tell_of_missing
from pier_node.site.running import Status, last_event
from pier_node.site.settings import Settings
from pier_node.site.shutdown import wait_for_unfinished
from pier_node.wire.carrier import HELLO, TOKENIZER_PART
from pier_node.wire.probe import ProbeServer
from pier_node.wire.transport import make_carrier
from pier_proto.v1.peer_pb2 import Site

if TYPE_CHECKING:
    from pier_node.site.pipeline import PipelineSite

LAST_ATTEMPT = 4.0
"""Seconds that a running attempt gets to finish when this site is told to stop."""
FOLLOW_SECONDS = 30.0
"""How long a program's daemon waits for the one before it to leave the folder."""
HELLO_SECONDS = 15.0
"""Seconds between two rounds of hellos, which synchronise rosters."""
REMEMBER = 0.1
"""Seconds between two notes of new peers or addresses, at least."""

log = logging.getLogger(__name__)


class Daemon:
    """One site of a run.

    Args:
        say: prints a message for the user.
        on_terminal: messages go to a terminal and not to a log, so they may contain the run's token.
        check_machine: called with the run before other sites hear of this one. Raises PierError: it cannot run here.
    """

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None] = print,
        on_terminal: bool = False,
        check_machine: Callable[[RunConfig, Settings], None] = lambda *_: None,
    ) -> None:
        self._settings, self._say, self._on_terminal = settings, say, on_terminal
        self._check_machine = check_machine
        self._stopping = asyncio.Event()
        self._program: Program | None = None
        self._entrance: Entrance | None = None

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Leave the run and end `run` within seconds. Ctrl+C and SIGTERM call it: see commands/daemon.py."""
        self._stopping.set()

    def _leave_with_program(self, step: int) -> None:
        assert self._entrance
        total = self._entrance.member.config.inner.total_steps
        self._say(f"The training program has left the run by itself, after inner step {step} of {total}.")
        self.stop()

    def status(self) -> Status | None:
        """The site's status; None: it has not joined its run yet."""
        return self._entrance.reporter.status(self._entrance.roster) if self._entrance else None

    async def run(self) -> None:
        """Take part in the run until it is finished or `stop` is called.

        Raises PierError when the site cannot continue.
        """
        await first_of(self._live(), self._until_it_may_leave())

    async def _until_it_may_leave(self) -> None:
        """Return once `stop` was called and no attempt is under way: other members rely on this site in it."""
        await self._stopping.wait()
        if self._entrance and self._entrance.reporter.rounds is not None:
            await first_of(self._entrance.reporter.rounds.at_rest(), asyncio.sleep(LAST_ATTEMPT))

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                joined = await self._join(stack)
                site: Replica | PipelineSite
                if joined.config.pipeline.stages > 1:
                    from pier_node.site import pipeline  # it computes in this process: PyTorch comes with it

                    site = await pipeline.prepare(joined, stack)
                else:
                    site = await prepare(joined, self._program, stack)
                await joined.background.guard(self._work(joined, site))
                await wait_for_unfinished(joined.config, joined.roster)
            except PierError as error:
                if self._program:
                    self._program.refuse(error)
                raise

    async def _work(self, joined: Joined, site: Replica | PipelineSite) -> None:
        """Train the run, and then experts if they are ordered."""
        await run_work(site.training, joined.roster, joined.orders)
        if isinstance(site, Replica):
            await site.finish()
        self._say(f"The run is finished: {several(total_rounds(joined.config), 'round')}.")
        if isinstance(site, Replica):
            self._say(site.conclusion())
            await site.train_experts()

    async def _join(self, stack: AsyncExitStack) -> Joined:
        """Find the run and enter it."""
        settings = await self._attach_program(stack) if self._settings.has_program else self._settings
        await asyncio.to_thread(check_start, settings)
        lock = await self._claimed()
        stack.callback(lock.close)
        await asyncio.to_thread(check_port, settings)
        member = await find_run(settings)
        if self._program:
            self._program.check(member.config)
        settings = settings.after(member.record)
        await asyncio.to_thread(self._check_machine, member.config, settings)
        entrance = Entrance(member, settings, self._say)
        self._entrance = entrance
        joined = await entrance.enter(stack, self._coordination(entrance))
        joined.background.start(stack, self._stays_claimed(lock))
        if joined.record.founder and member.enrolment is None:
            kept = None if self._on_terminal else Token.path(settings.folder).absolute()
            self._say(member.invitation(joined.reporter.site.address, kept))
        return joined

    def _coordination(self, entrance: Entrance) -> Coordination | None:
        """The site's dealings with its coordinator; None: the run has none."""
        if entrance.member.enrolment is None:
            return None
        return Coordination(
            entrance.member, entrance.settings, entrance.reporter, entrance.carrier, entrance.roster, self.stop
        )

    async def _claimed(self) -> IO[bytes]:
        """The folder, for this daemon alone. The previous daemon of a restarted program may still be leaving it."""
        deadline = time.monotonic() + (FOLLOW_SECONDS if self._settings.program_socket else 0.0)
        while True:
            try:
                return claim(self._settings.folder)
            except PierError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _stays_claimed(self, lock: IO[bytes]) -> None:
        while True:
            require_claimed(self._settings.folder, lock)
            await asyncio.sleep(1.0)

    async def _attach_program(self, stack: AsyncExitStack) -> Settings:
        """Wait for the training program. Returns the settings, with the run that it founds, if it founds one.

        Raises PierError.
        """
        settings = self._settings
        command = Command.parse(settings.command) if settings.command else None
        program = self._program = Program(settings.program_socket, command)
        program.on_left = self._leave_with_program
        stack.push_async_callback(program.stop)
        attach = await program.attached()
        # A site that joins takes the run from its peers.
        given = "" if settings.peers or settings.coordinator else attach.config
        tables = read_toml(settings.run, "pier-node init") if settings.run else json.loads(given or "null")
        if tables is None:
            return settings
        tables["program"] = {"step_tokens": attach.step_tokens, "tensors": attach.tensors}
        name = str(settings.run or "the run of the training program")
        return replace(settings, run=None, founding=validated(tables, RunConfig, name))


class Entrance:
    """The way of a site into its run: it listens, finds the other sites, takes a slot and serves its status.

    Attributes:
        carrier, roster, reporter: the site's end of the wire, the sites that it knows, and what it reports.
    """

    def __init__(self, member: Membership, settings: Settings, say: Callable[[str], None]) -> None:
        self.member, self.settings, self._say = member, settings, say
        config, node, run_hash = member.config, member.identity.node, member.config.hash()
        self.carrier = make_carrier(member.transport, node, run_hash, member.credentials, settings.folder)
        self.carrier.count_from(int(last_event(settings.folder).get("bytes_sent", 0)))
        named = settings.name or (member.record.name if member.record else "")
        self._site = Site(node=node, name=named or socket.gethostname())
        self._signer = Signer(member.identity, run_hash)
        self._statements = SignedStatements(self._signer, member.witness)
        self.reporter = Reporter(config, self._site, self.carrier, Progress())
        self.roster = Roster(self.carrier, self.reporter.pulse, signer=self._signer)
        self._record = SiteRecord(not settings.peers, slot=0, transport=member.transport)
        self._background = Background()

    async def enter(self, stack: AsyncExitStack, coordination: Coordination | None) -> Joined:
        """Enter the run. From here on other sites see this one. Raises PierError."""
        member, settings, config = self.member, self.settings, self.member.config
        name_in_logs(self.roster.called)
        stack.push_async_callback(self.carrier.stop)
        stack.push_async_callback(self.roster.stop)
        known = member.record
        if coordination:
            stack.push_async_exit(coordination.close)
            known = await coordination.enter(known)
        self._record = known or self._record
        proofs = await asyncio.to_thread(Proofs, settings.folder / PROOFS_FILE)
        convicted = Convicted(settings.folder, self._statements, proofs, self._bar)
        convicted.restore()
        revoked = coordination.revoked if coordination else None
        reception = Reception(self.carrier, self.roster, config, lambda: self._site, convicted, revoked)
        self.carrier.serve(HELLO, reception.answer)
        self.carrier.serve(TOKENIZER_PART, reception.part_of_tokenizer)
        ProbeServer(self.carrier, config.hash(), self.roster.address)
        await self._meet(stack, reception, is_known=known is not None)
        joined = Joined(
            config=config,
            settings=settings,
            carrier=self.carrier,
            roster=self.roster,
            statements=self._statements,
            proofs=proofs,
            reporter=self.reporter,
            record=self._record,
            convict=lambda proof: convicted.take([proof]),
            background=self._background,
            coordination=coordination,
            say=self._say,
        )
        if config.program:
            self._say(f"This site trains a model of its own program: {Layout.of_run(config).length:,} parameters.")
        else:
            self._say(joined.data.describe(config))
        self._save_record()
        self._background.start(stack, self._remember_peers())
        self._background.start(stack, tell_of_missing(self.reporter, self.roster))
        if coordination:
            self._background.start(stack, coordination.client.run())
            self._background.start(stack, coordination.sample())
        return joined

    async def _meet(self, stack: AsyncExitStack, reception: Reception, is_known: bool) -> None:
        """Listen, make this site known to the others, and take a slot that none of them has."""
        settings, record = self.settings, self._record
        peers = [*settings.peers, *(site.address for site in record.sites())]
        choice = await self.carrier.listen(settings.listen, settings.advertise, peers)
        self._site.address = choice.address
        self._sign_entry()
        self._say(choice.why)
        command = self.member.command(choice.address)
        self.reporter.invitation = f"Another site joins with `{command}`."
        await self._serve_status(stack)
        for site in record.sites():
            self.roster.add(site, participant=True)
        await reception.introduce(peers)
        free = not (is_known or record.founder)
        self._site.slot = free_slot(self.roster, self.member.config.run.sites) if free else record.slot
        founder = self.member.founder or record.founded_by
        self._record = replace(settings.noted(record), slot=self._site.slot, name=self._site.name, founded_by=founder)
        self._sign_entry()
        self._background.start(stack, self._greet(reception, peers))

    def _bar(self, nodes: Iterable[str], why: str) -> None:
        self.roster.bar(nodes, why)
        self.carrier.refuse(nodes, why)

    def _sign_entry(self) -> None:
        """Sign this site's roster entry with a version newer than any before, whatever the clock says."""
        newest = max(int(time.time() * 1000), self._record.version + 1, self._site.version + 1)
        sign_entry(self._site, self._signer, newest)

    async def _serve_status(self, stack: AsyncExitStack) -> None:
        server = StatusServer(lambda: self.reporter.status(self.roster))
        port = await server.start(self.settings.http)
        stack.push_async_callback(server.stop)
        path, pid = self.settings.folder / DAEMON_FILE, os.getpid()
        noted = {"pid": pid, "began": ticks_of(pid), "http": f"http://127.0.0.1:{port}"}
        try:
            durable.replace(path, json.dumps(noted).encode())
        except OSError as error:
            raise unwritable(self.settings.folder, error) from error
        stack.callback(_remove, path)

    async def _greet(self, reception: Reception, peers: list[str]) -> None:
        """Repeat the hello to all known sites and to the given peers, some of which may not have answered at first."""
        while True:
            await asyncio.sleep(HELLO_SECONDS)
            await reception.introduce([*peers, *self.roster.reached_at()])
            self._try_to_save_record()

    async def _remember_peers(self) -> None:
        """Write down new peers and addresses at once: a site that is killed and back knows where to reach them all."""
        while True:
            await self.roster.changed.until(self._has_new_addresses)
            self._try_to_save_record()
            await asyncio.sleep(REMEMBER)

    def _has_new_addresses(self) -> bool:
        noted = {node: address for node, _, address, *_ in self._record.peers}
        return any(noted.get(site.node) != site.address for site in self.roster.known())

    def _try_to_save_record(self) -> None:
        try:
            self._save_record()
        except PierError as error:  # the previous peers are good enough
            log.warning("%s", error.problem)

    def _save_record(self) -> None:
        self._record = replace(self._record.with_peers(self.roster.known()), version=self._site.version)
        self._record.save(self.settings.folder)


def _remove(path: Path) -> None:
    """Remove a file, if that is possible: what ends this site is more important, and may be why it is not."""
    with suppress(OSError):
        path.unlink()
