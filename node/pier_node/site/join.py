"""Joining a run: a site founds one, returns to the one in its data folder, or is admitted by a peer or a coordinator.

As long as the site has taken part in no round, a command may name another run for its data folder. Founders often find
mistakes in run.toml in the first minutes, and must be able to correct them without a new folder.

How a site comes back after it missed rounds is in rounds/catch_up.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pier_node.base.address import parse_address
from pier_node.base.errors import PierError
from pier_node.base.patience import Attempts
from pier_node.config.presets import DATA, RUN_TOML, TOKENIZER
from pier_node.config.run import RunConfig, config_changes, from_canonical, load
from pier_node.identity.certificates import Credentials, credentials
from pier_node.identity.invite import Invite
from pier_node.identity.node import TOKEN_VARIABLE, Identity, Token
from pier_node.rounds.double_votes import CONVICTED_FILE, Convicted
from pier_node.rounds.folder import (
    EARLIER_EVENTS_FILE,
    EVENTS_FILE,
    RUN_FILE,
    SITE_FILE,
    SiteRecord,
    load_run,
    save_run,
)
from pier_node.rounds.proofs import EARLIER_FILE, PROOFS_FILE
from pier_node.rounds.revocations import FILE as REVOKED_FILE
from pier_node.rounds.revocations import Revoked
from pier_node.rounds.roster import Roster
from pier_node.site.coordinator.link import Enrolment, Link, NoLease, Refused, Unreachable, enrol_patiently, patiently
from pier_node.site.journal import Journal
from pier_node.site.resume import no_weights
from pier_node.site.running import start_command, to_continue
from pier_node.site.settings import Settings
from pier_node.trainer.data.corpus import SiteData, check_data
from pier_node.trainer.parallel import AUTO
from pier_node.wire import tokenizer
from pier_node.wire.addresses import free_port
from pier_node.wire.carrier import GREETING, PROTOCOL, TOKENIZER_PART, BadMessage, PeerLost, PeerRefused
from pier_node.wire.links import SiteCarrier
from pier_node.wire.transport import Transport, check_address, make_carrier
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, Site, TokenizerPart, TokenizerRequest

STATES = ("checkpoints", "states")
OF_PIPELINE = ("tallies", "given", "stage-*", "own/*", "residual/*")
"""What the folder of a site of a pipeline has in place of, or beside, STATES."""
OF_PROGRAM = ("program/optimizer-*",)
"""What a program's optimizer has learned: see `pier.join`."""
JOURNAL = "journal.json"


def is_replaced(settings: Settings) -> bool:
    """Whether the run in the folder is replaced by the one that the command names. Raises PierError."""
    folder, stored = settings.folder, load_run(settings.folder)
    if stored is None or settings.coordinator or Enrolment.load(folder) or took_part(folder):
        return False
    if settings.run:
        return load(settings.run).hash() != stored.hash()
    return bool(settings.peers and settings.token) and not Token.parse(settings.token or "").is_for(stored.hash())


def with_run_here(settings: Settings) -> Settings:
    """The settings, with run.toml of this folder as the run to found if they name neither a run nor a data folder.

    Like --run it may be corrected until the first round; from then on, the run in the data folder counts.
    """
    folder, others = settings.folder, settings.run or settings.peers or settings.coordinator or settings.has_program
    if others or folder != DATA or not RUN_TOML.exists() or Enrolment.load(folder):
        return settings
    record = SiteRecord.load(folder)
    if record and not record.founder:
        return settings
    if not took_part(folder):
        return replace(settings, run=RUN_TOML)
    stored = load_run(folder)
    if stored and stored.program is None and not _describes(RUN_TOML, stored):
        log.warning(
            "%s differs from the run in %s, which continues as it is: found another run with --run %s and a --data "
            "folder of its own",
            *(RUN_TOML, folder, RUN_TOML),
        )
    return settings


def _describes(file: Path, run: RunConfig) -> bool:
    try:
        return load(file).hash() == run.hash()
    except PierError:
        return False


def took_part(folder: Path) -> bool:
    """Whether a site has completed a round, or has sent anything that binds it in one."""
    names = [path.name for kind in STATES for path in folder.glob(f"{kind}/*round-*")]
    if any(int(name.rpartition("round-")[2][:8]) for name in names):
        return True
    bound = Journal(folder / JOURNAL).load(0, "")
    return bound.committed > 0 or bound.engaged or (folder / "pairs.json").exists() or any(folder.glob("own/*"))


def forget_run(folder: Path) -> None:
    """Detach such a folder from its run. Its node id stays."""
    events = EVENTS_FILE, EARLIER_EVENTS_FILE
    for name in (SITE_FILE, *events, REVOKED_FILE, JOURNAL, PROOFS_FILE, EARLIER_FILE, CONVICTED_FILE):
        (folder / name).unlink(missing_ok=True)
    Token.path(folder).unlink(missing_ok=True)
    inside = (f"{kind}/*" for kind in STATES)  # the folder may be a mount point
    for path in [path for pattern in (*inside, *OF_PIPELINE, *OF_PROGRAM) for path in folder.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / RUN_FILE).unlink(missing_ok=True)  # last: if interrupted, it starts again from the top


PATIENCE = 300.0
"""Seconds to keep trying peers that do not answer."""
GREETINGS = 16
"""Number of concurrent hellos."""
CLOCKS = 10.0
"""Seconds by which the clocks of two sites may differ. At a difference of a day, certificates are refused."""
SET_CLOCKS = "Run NTP at both sites (timedatectl set-ntp true); clocks a day apart refuse each other's certificates."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Membership:
    """This site's place in a run."""

    config: RunConfig
    identity: Identity
    token: Token | None
    credentials: Credentials | None
    record: SiteRecord | None
    transport: Transport
    enrolment: Enrolment | None = None

    @property
    def founder(self) -> str:
        """Node id of the run's founder, as told by a trusted source; empty if not told."""
        if self.token and self.token.founder:
            return self.token.founder
        return self.record.founded_by if self.record else ""

    @property
    def witness(self) -> str:
        """Node id of the run's witness: the coordinator, which gave this site its place; empty if it has none."""
        return self.enrolment.node if self.enrolment and self.config.run.witness else ""

    def command(self, address: str) -> str:
        """The command with which another site joins the run. There is no secret in it."""
        if self.enrolment:
            return "pier-coordinator invite"
        transport = "" if self.transport == "grpc" else f" --transport {self.transport}"
        program = " --exec 'python train.py'" if self.config.program else ""
        return f"pier-node start --peers {address}{transport}{program}{'' if self.token else ' --insecure'}"

    def invitation(self, address: str, kept: Path | None = None) -> str:
        """How another machine joins this site.

        Args:
            kept: path of the token, for output that may go to a log and must not contain the token. None: show the
                token.
        """
        command = self.command(address)
        if self.token is None:
            return f"To join from another machine:\n\n  {command}\n"
        if kept is None:
            return (
                f"To join from another machine:\n\n  {command}\n\n"
                f"It asks for the token of this run:\n\n  {self.token}\n\n"
                f"Where nobody can answer, give it as {TOKEN_VARIABLE}, or in a file: --token-file FILE.\n"
            )
        return f"To join from another machine that has a copy of {kept}:\n\n  {command} --token-file {kept.name}\n"


async def find_run(settings: Settings) -> Membership:
    """Determine which run this is, and load the credentials that admit this site to it. Raises PierError."""
    folder = settings.folder
    identity, (transport, record) = Identity.load_or_create(folder), find_site(settings)
    if settings.coordinator or Enrolment.load(folder):
        return await _through_coordinator(settings, identity, transport, record)
    token = find_token(settings)
    config = known_config(settings)
    if token is None and config is not None and not settings.peers and not settings.insecure:
        token = Token.new(config.hash(), identity.node)
    unchecked = config is None or _with_tokenizer_here(config, settings, record) is None

    def connect(run_hash: bytes) -> SiteCarrier:
        return make_carrier(transport, identity.node, run_hash, credentials(identity, token) if token else None)

    if config is None:
        config = await _ask_for_config(settings.peers, connect)
    if config.run.witness:
        raise PierError(
            "run.witness = true, but this run has no coordinator, which would be the witness",
            "Leave it out, or make the run with `pier-coordinator init`: docs/multi-site.md.",
        )
    if token is not None:
        token.require_run(config.hash())
    addresses = [*settings.peers, *(site.address for site in record.sites())] if record else settings.peers
    config = await _with_tokenizer(config, settings, partial(_tokenizer_of_peers, connect, addresses))
    if unchecked:
        await asyncio.to_thread(check_needs, config, settings.after(record), record)
    if is_replaced(settings):
        log.warning("%s belonged to another run, in which it took part in no round; it belongs to this run now", folder)
        forget_run(folder)
    if token is not None:
        token.save(folder)
    save_run(folder, config)
    return Membership(config, identity, token, credentials(identity, token) if token else None, record, transport)


def check_start(settings: Settings) -> None:
    """Check everything that can be checked before anything is written and before other sites hear of this one.

    Raises:
        PierError: the options contradict each other or are incomplete, or training could not begin.
    """
    _, record = find_site(settings)
    by_coordinator = settings.coordinator or Enrolment.load(settings.folder)
    config = load_run(settings.folder) if by_coordinator else known_config(settings)
    if not by_coordinator:
        find_token(settings)
    if config and (ready := _with_tokenizer_here(config, settings, record)):
        check_needs(ready, settings.after(record), record)


def _with_tokenizer_here(config: RunConfig, settings: Settings, record: SiteRecord | None) -> RunConfig | None:
    """The configuration with the path of the run's tokenizer.json; None: this site is to get that from others."""
    others = settings.peers or settings.coordinator or Enrolment.load(settings.folder) or (record and record.peers)
    return tokenizer.located(config, settings.folder, _brought(settings)) or (None if others else config)


def _brought(settings: Settings) -> list[Path]:
    return [settings.weights / TOKENIZER] if settings.weights else []


def check_port(settings: Settings) -> None:
    """Check that this site can listen, before its token is printed and other sites hear of it. Raises PierError."""
    _, record = find_site(settings)
    free_port(*parse_address(settings.after(record).listen))


def check_needs(config: RunConfig, settings: Settings, record: SiteRecord | None) -> None:
    """Check that this site can train: it needs enough data, a tokenizer that fits, and a sequence per worker."""
    _refuse_unused(config, settings)
    if config.program:
        if not settings.has_program:
            raise PierError(
                "this run trains its users' own model, in a program",
                "Start this site with --exec 'COMMAND', or start a program that calls pier.join(..., peers=...): "
                "docs/program.md shows both.",
            )
        return
    check_weights(config, settings, founds=not (record or settings.peers or settings.coordinator))
    batch = config.inner.batch_size
    if settings.workers:
        settings.parallel.check(config, settings.workers)
    if settings.workers // settings.parallel.tensor > batch:
        raise PierError(
            f"--workers {settings.workers} is more than inner.batch_size = {batch}: some workers would be idle",
            f"Start this site with --workers {batch} or fewer, or raise inner.batch_size before the run begins.",
        )
    try:
        check_data(config, _data(config, settings, record))
    except PierError as error:
        if config.pipeline.stages == 1 or settings.data:
            raise
        log.warning("this site cannot hold the first stage, which reads the data: %s", error)


def _refuse_unused(config: RunConfig, settings: Settings) -> None:
    """Check that no option would be ignored. Raises PierError."""
    workers = {"--workers": settings.workers > 1, "--parallel, --tensor, --checkpointing": settings.parallel != AUTO}
    if settings.shared_data and settings.data is None:
        given, why = {"--shared-data": True}, "it says what --dataset is, which is not given"
    elif config.program:
        given = {"--dataset": settings.data is not None, **workers}
        why = "the site's own program brings its data and processes"
    elif config.pipeline.stages > 1:
        given = {**workers, "--checkpoint-every": settings.checkpoint_every > 1}
        why = "a site of a pipeline computes in one process, and keeps every step on its disk"
    else:
        return
    if unused := [name for name, value in given.items() if value]:
        raise PierError(f"{unused[0]} would have no effect: {why}", "Start this site without it.")


def _data(config: RunConfig, settings: Settings, record: SiteRecord | None) -> SiteData:
    """This site's data; all parts of the run's data if it is still to be told which part it gets."""
    data = SiteData.of(config, record.slot if record else 0, settings.data, settings.shared_data)
    joins = record is None and (settings.peers or settings.coordinator)
    return replace(data, slots=1) if joins else data


def check_weights(config: RunConfig, settings: Settings, founds: bool) -> None:
    """Check that --from is for a founder, and has the weights of the run's model, and what that needs.

    Raises PierError.

    Args:
        founds: this site founds the run now.
    """
    if config.model.transformers:
        config.model.transformers.require_library()
        if settings.parallel.tensor > 1:
            settings.parallel.check(config, settings.workers or settings.parallel.tensor)
    folder = settings.weights
    if folder is None:
        if config.begins_pretrained and founds:
            raise no_weights(config)
        return
    if settings.peers:
        raise PierError("--from is for the site that founds a run", "Leave it out: others get the weights from there.")
    if config.pipeline.stages > 1 and not config.begins_pretrained:
        raise PierError(
            f"the run begins with random weights, so those in {folder} are of no use",
            "Set run.pretrained = true before the run begins, as `pier-node init --from` does.",
        )
    from pier_node.trainer.model.hub import read_config

    free = {"preset"} if config.model.form == "gpt2" else {"preset", "context"}  # only its positions have weights
    found = read_config(folder)
    ours, theirs = (each.model_dump(exclude=free) for each in (config.model, found))
    if ours != theirs:
        changes = config_changes(json.dumps({"model": ours}), json.dumps({"model": theirs}))
        raise PierError(
            f"the weights in {folder} are of another model than [model] of the run: {changes}",
            f"Write a run.toml for them with: pier-node init --from {folder}",
        )
    if found.transformers and config.model.context > found.context:
        raise PierError(
            f"model.context = {config.model.context}, but the model in {folder} reads {found.context} tokens at most",
            f"Set model.context to {found.context} or less before the run begins.",
        )


async def _through_coordinator(
    settings: Settings, identity: Identity, transport: Transport, record: SiteRecord | None
) -> Membership:
    enrolment, config = await find_place(settings, identity)
    save_run(settings.folder, config)  # before the check: the invite may be used up, and must not be needed again
    fetch = partial(_tokenizer_of_coordinator, enrolment, enrolment.credentials(identity))
    config = await _with_tokenizer(config, settings, fetch)
    await asyncio.to_thread(check_needs, config, settings.after(record), record)
    return Membership(config, identity, None, enrolment.credentials(identity), record, transport, enrolment)


async def find_place(settings: Settings, identity: Identity) -> tuple[Enrolment, RunConfig]:
    """The place that the coordinator has given this site, or now gives it for an invite. Raises PierError."""
    folder, enrolment, config = settings.folder, Enrolment.load(settings.folder), load_run(settings.folder)
    if enrolment is None or config is None:
        if settings.coordinator is None or settings.token is None:
            raise PierError("--coordinator needs the --token of an invite", "`pier-coordinator invite` prints one.")
        if config is not None and took_part(folder):
            raise PierError(f"{folder} already belongs to a run", "Choose another --data folder.")
        invite = Invite.parse(settings.token)
        name = settings.name or socket.gethostname()
        enrolment, config = await enrol_patiently(settings.coordinator, invite, identity, name)
        forget_run(folder)
    enrolment = replace(enrolment, address=settings.coordinator or enrolment.address)
    enrolment.save(folder)
    return enrolment, config


def find_site(settings: Settings) -> tuple[Transport, SiteRecord | None]:
    """The transport to use, as given or as before, and this site's record. Raises PierError."""
    record = None if is_replaced(settings) else SiteRecord.load(settings.folder)
    transport = settings.transport or (record.transport if record else "grpc")
    for peer in settings.peers:
        check_address(transport, peer)
    if record and record.transport != transport:  # the old addresses are useless with another transport
        record = replace(record, peers=(), transport=transport)
    return transport, record


def find_token(settings: Settings) -> Token | None:
    """The token that was given or stored; None: --insecure, or there is no run yet. Raises PierError."""
    if settings.insecure:
        return None
    kept = None if is_replaced(settings) else Token.load(settings.folder)
    token = Token.parse(settings.token) if settings.token else kept
    if token is None and settings.peers:
        raise PierError(
            "--peers needs the --token that the first site printed",
            "Give it with --token-file FILE, or as PIER_TOKEN in the environment; on a terminal, pier-node asks. "
            "Start with --insecure only if every site does, on a network where everyone is trusted.",
        )
    if token is None and not is_replaced(settings) and (record := SiteRecord.load(settings.folder)) and record.peers:
        raise PierError(
            f"{Token.path(settings.folder)} is gone: without the token of the run, no other site answers this one",
            "Copy it from the --data folder of another site, or give the token with --token-file FILE. If all sites "
            "of the run start with --insecure, so must this one.",
        )
    return token


def known_config(settings: Settings) -> RunConfig | None:
    """The run's configuration, if this machine has it; None: it has to come from the peers. Raises PierError."""
    stored = None if is_replaced(settings) else load_run(settings.folder)
    given = settings.founding or (load(settings.run) if settings.run else None)
    if stored and given and stored.hash() != given.hash():
        raise PierError(
            f"{settings.folder} belongs to another run than {settings.run or 'the program founds'}: "
            f"{config_changes(stored.canonical(), given.canonical())}",
            f"A run's configuration never changes. To continue it: {to_continue(settings.folder)}\n"
            "For another run, choose another --data folder.",
        )
    if not (stored or given or settings.peers):
        found = "Found one: `pier-node init`, then `pier-node start`"
        if RUN_TOML.exists():
            command = start_command(settings.folder, None)
            found = f"Found the run of the {RUN_TOML} in this folder: `{command} --run {RUN_TOML}`"
        raise PierError(
            "this site does not know which run to join",
            f"{found}. Or join one with `pier-node start --peers "
            "ADDRESS`, or with the command that `pier-coordinator invite` prints. Or give the --data folder of a run.",
        )
    return given or stored


Connect = Callable[[bytes], SiteCarrier]
"""A carrier in the run with that hash; b"": it is not known yet."""


async def _ask_for_config(peers: Iterable[str], connect: Connect) -> RunConfig:
    carrier = connect(b"")
    try:
        reply = await first_answer(carrier, peers, HelloRequest(protocol=PROTOCOL, site=Site(node=carrier.node)))
    finally:
        await carrier.stop()
    return from_canonical(reply.run_config)


async def _with_tokenizer(
    config: RunConfig, settings: Settings, fetch: Callable[[RunConfig, Path], Awaitable[RunConfig]]
) -> RunConfig:
    """The configuration with the path of this site's copy of the run's tokenizer.json, if the run has one."""
    if config.program:
        return config
    kept = await asyncio.to_thread(tokenizer.keep, config, settings.folder, _brought(settings))
    try:
        return kept or await fetch(config, settings.folder)
    except PierError as error:
        if config.pipeline.stages == 1:
            raise
        log.warning("%s", error)  # only the first stage reads text
        return config


async def _tokenizer_of_peers(connect: Connect, peers: Sequence[str], config: RunConfig, folder: Path) -> RunConfig:
    if not peers:
        raise _no_tokenizer("there is no site to ask", folder)
    attempts = Attempts(f"no site has sent the run's {TOKENIZER} yet", PATIENCE)
    carrier = connect(config.hash())
    try:
        request = HelloRequest(protocol=PROTOCOL, run_hash=config.hash(), site=Site(node=carrier.node))
        while True:
            reply, problem = await first_answer(carrier, peers, request), "who answers there knows of no site"
            for site in {site.node: site for site in (reply.site, *reply.roster) if site.address}.values():
                carrier.introduce(site.node, site.address)
                log.info("fetching the run's %s from %s", TOKENIZER, site.name or site.node)
                try:
                    ask = partial(carrier.call, site.node, TOKENIZER_PART, timeout=tokenizer.PATIENCE)
                    return await tokenizer.fetch(config, folder, ask)
                except (PeerLost, BadMessage) as lost:
                    problem = str(lost)
            if not await attempts.failed(problem):
                raise _no_tokenizer(problem, folder)
    finally:
        await carrier.stop()


async def _tokenizer_of_coordinator(
    enrolment: Enrolment, own: Credentials, config: RunConfig, folder: Path
) -> RunConfig:
    link = Link(enrolment.address, enrolment.node, own)
    log.info("fetching the run's %s from the coordinator", TOKENIZER)
    try:
        fetch = partial(tokenizer.fetch, config, folder, link.tokenizer)
        return await patiently(f"the coordinator has not sent the run's {TOKENIZER} yet", fetch)
    except (Unreachable, Refused, NoLease, BadMessage) as problem:
        raise _no_tokenizer(str(problem), folder) from problem
    finally:
        await link.close()


def _no_tokenizer(why: str, folder: Path) -> PierError:
    return PierError(
        f"the run's {TOKENIZER} is not here, and nobody has sent it: {why}",
        f"Copy that of the run's founder to {folder / TOKENIZER}.",
    )


async def first_answer(carrier: SiteCarrier, addresses: Iterable[str], request: HelloRequest) -> HelloReply:
    """Try addresses until one answers.

    Raises:
        PierError: all of them refuse this site, or none answers within PATIENCE seconds. The text has each one's
            reason.
    """
    attempts = Attempts("no peer answers yet (does `pier-node start` run there, and is its port open?)", PATIENCE)
    while True:
        losses: list[PeerLost] = []
        for address in addresses:
            try:
                return await carrier.greet(address, request, GREETING)
            except PeerLost as lost:
                losses.append(lost)
        problems = [_said(lost) for lost in losses]
        if all(isinstance(lost, PeerRefused) for lost in losses):
            raise PierError(
                f"no peer lets this site in: {'; '.join(problems)}",
                "Start it with the --token that the first site of the run printed, and keeps in run.token of its "
                "--data folder, and with the same version of Pier.",
            )
        if not await attempts.failed("; ".join(problems)):
            raise PierError(
                f"no peer answered for {PATIENCE:.0f} s: {'; '.join(problems)}",
                "Check that a site is running there, that its port is open and that the token is right. `pier-node "
                f"doctor --peers {','.join(addresses)}` tells more.",
            )


def _said(lost: PeerLost) -> str:
    return lost.reason if lost.reason.startswith(lost.node) else f"{lost.node}: {lost.reason}"


def clock_in_words(ahead: float) -> str:
    """How far the clock of a peer is ahead of this site's, in seconds; "": close enough."""
    if abs(ahead) <= CLOCKS:
        return ""
    return f"its clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this site's"


class Reception:
    """Sends and answers hellos: keeps the roster complete and spreads the news of removed sites.

    Args:
        convicted: the sites removed for voting twice.
        revoked: the revoked sites; None: the run has no coordinator, so no site can be revoked.
    """

    def __init__(
        self,
        carrier: SiteCarrier,
        roster: Roster,
        config: RunConfig,
        me: Callable[[], Site],
        convicted: Convicted,
        revoked: Revoked | None = None,
    ) -> None:
        self._carrier, self._roster, self._config, self._me = carrier, roster, config, me
        self._convicted, self._revoked = convicted, revoked
        self._silent: dict[str, PeerLost] = {}  # reason, by address
        self._told: set[str] = set()  # addresses whose silence was already logged
        self._clocks_told: set[str] = set()  # nodes whose clock was already logged
        self._heard: dict[str, bytes] = {}  # by address: the hash of its roster, if this site has all of that
        self._forgotten = 0

    async def answer(self, sender: str, request: HelloRequest) -> HelloReply:
        """Admit a site, or tell it why not."""
        if request.protocol != PROTOCOL:
            raise BadMessage(
                f"the caller speaks protocol {request.protocol}, this site {PROTOCOL}: use one version of Pier"
            )
        if request.run_hash and request.run_hash != self._config.hash():
            raise BadMessage(f"this is run {self._config.hash().hex()[:8]}, not {request.run_hash.hex()[:8]}")
        if request.site.node == sender and request.site.address:
            self._roster.add(request.site)
        roster = [self._me(), *(site for site in self._roster.known() if site.signature)]
        digest = _roster_hash(roster)
        return HelloReply(
            protocol=PROTOCOL,
            run_hash=self._config.hash(),
            run_config=self._config.canonical(),
            site=self._me(),
            roster=[] if digest == request.roster_hash else roster,
            roster_hash=digest,
            revocations=self._revoked.newest if self._revoked else None,
            double_votes=self._convicted.proven,
            time=time.time(),
        )

    async def part_of_tokenizer(self, _sender: str, request: TokenizerRequest) -> TokenizerPart:
        """A part of the run's tokenizer.json. Raises BadMessage."""
        return await asyncio.to_thread(tokenizer.part, self._config, request)

    async def introduce(self, addresses: Iterable[str]) -> int:
        """Send hellos to addresses, and to new ones in the rosters received. Returns how many answered."""
        waiting, tried, answered, some = {*addresses}, {self._me().address}, 0, asyncio.Semaphore(GREETINGS)
        if self._roster.forgotten != self._forgotten:
            self._heard, self._forgotten = {}, self._roster.forgotten
        while new := waiting - tried:
            tried |= new
            asked = sorted(new)
            replies = await asyncio.gather(*(self._greeted(address, some) for address in asked))
            there = {address: reply for address, reply in zip(asked, replies, strict=True) if reply}
            answered, waiting = answered + len(there), set()
            for reply in there.values():
                if reply.site.address:
                    self._roster.add(reply.site)
            for address, reply in there.items():
                waiting |= {site.address for site in self._roster.hear(reply.roster, reply.site.node)}
                if self._roster.has(reply.roster):
                    self._heard[address] = reply.roster_hash
        self._heard = {address: digest for address, digest in self._heard.items() if address in tried}
        self._tell_of_silence(tried)
        return answered

    def _tell_of_silence(self, tried: set[str]) -> None:
        """Log each silent address once, except sites in the roster, which logs them itself when they do not answer."""
        contacts = self._roster.contacts.items()
        known = {contact.site.address for node, contact in contacts if not self._roster.alive(node)}
        self._silent = {address: lost for address, lost in self._silent.items() if address in tried}
        self._told &= self._silent.keys()
        for address in sorted(self._silent.keys() - self._told - known):
            log.info("no hello from %s", _said(self._silent[address]))
            self._told.add(address)

    async def _greeted(self, address: str, some: asyncio.Semaphore) -> HelloReply | None:
        """Say hello to one address. Returns None if it is silent, so that it does not delay the others."""
        request = HelloRequest(
            protocol=PROTOCOL,
            run_hash=self._config.hash(),
            site=self._me(),
            roster_hash=self._heard.get(address, b""),
        )
        try:
            async with some:
                reply = await self._carrier.greet(address, request, GREETING)
        except PeerLost as lost:
            self._silent[address] = lost
            return None
        self._silent.pop(address, None)
        self._compare_clocks(address, reply)
        if self._revoked:
            self._revoked.take(reply.revocations)
        try:
            self._convicted.take(reply.double_votes)
        except BadMessage as bad:
            log.warning("%s sent a double vote that proves nothing: %s", address, bad)
        return reply

    def _compare_clocks(self, address: str, reply: HelloReply) -> None:
        """Log that a peer's clock is off, once; the time that its answer took is within what is allowed."""
        wrong = clock_in_words(reply.time - time.time()) if reply.time else ""
        if wrong and reply.site.node not in self._clocks_told:
            self._clocks_told.add(reply.site.node)
            log.warning("%s (%s): %s. %s", reply.site.name or reply.site.node, address, wrong, SET_CLOCKS)


def _roster_hash(roster: Iterable[Site]) -> bytes:
    """SHA-256 of the sites' ids and versions: an entry never changes without its version."""
    return hashlib.sha256(" ".join(sorted(f"{site.node}/{site.version}" for site in roster)).encode()).digest()


def free_slot(roster: Roster, slots: int) -> int:
    """The lowest slot of the training data that no known site has; slots are shared once all are taken."""
    taken = {contact.site.slot for contact in roster.contacts.values()}
    return next((slot for slot in range(slots) if slot not in taken), len(taken) % slots)
