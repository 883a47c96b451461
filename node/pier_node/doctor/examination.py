"""The complete examination: the links to every site of the run and back, then this machine's resources.

It begins with the site's options and data folder, which are read without changing them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Self

from rich.console import Console

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, from_canonical
from pier_node.doctor import machine
from pier_node.doctor.finding import THIS_SITE, Finding, Verdict, as_fields, is_wrong, show
from pier_node.doctor.links import Round, go_round, missed, utilisation_finding, visit
from pier_node.doctor.machine import boundary_finding
from pier_node.identity.certificates import Credentials, credentials
from pier_node.identity.node import Identity, Token
from pier_node.outer.layout import Layout
from pier_node.pipeline.stage import stage_layout
from pier_node.rounds.prediction import Line
from pier_node.site.coordinator.link import Enrolment
from pier_node.site.join import find_site, find_token, known_config
from pier_node.site.running import Running, Status, find_daemon, last_event
from pier_node.site.settings import Settings
from pier_node.trainer import devices
from pier_node.wire.carrier import HELLO, PROTOCOL
from pier_node.wire.links import SiteCarrier
from pier_node.wire.probe import LinkSpeed
from pier_node.wire.transport import Transport, make_carrier
from pier_proto.v1.peer_pb2 import HelloReply, HelloRequest, Site


def doctor(settings: Settings, as_json: bool) -> int:
    """Examine and print. Returns the exit code: 1 if there is a problem. Raises PierError."""
    logging.basicConfig(level=logging.ERROR)  # problems of the run appear in the table
    with Console(stderr=True).status("Looking at the sites of the run, one after the other ..."):
        findings = asyncio.run(examine(settings))
    if as_json:
        print(json.dumps(as_fields(findings)))
    else:
        show(findings, Console())
    return int(is_wrong(findings))


async def examine(settings: Settings) -> list[Finding]:
    """Check everything. Raises PierError: the options contradict each other or are incomplete."""
    here = Standpoint.of(settings)
    found = await _meet(here)
    if here.config is None and found.met:
        here = here.in_run(from_canonical(next(iter(found.met.values())).run_config))
    lost = [missed(here.addresses.get(address, ""), address, reason) for address, reason in found.missed.items()]
    if here.config is None:
        return lost
    address, seen, links = await _visit(here, here.config, found.met)
    sites = max(here.config.run.sites, 1 + len(found.met))  # that take part or answer, this one included
    return [address, *_of_this_machine(here, here.config, sites, links), *seen, *lost]


async def _meet(here: Standpoint) -> Round:
    run_hash = here.config.hash() if here.config else b""
    carrier = make_carrier(here.transport, here.identity.node, run_hash, here.credentials)
    try:
        return await go_round(carrier, set(here.addresses) - {here.status.get("address")}, run_hash)
    finally:
        await carrier.stop()


async def _visit(
    here: Standpoint, config: RunConfig, met: dict[str, HelloReply]
) -> tuple[Finding, list[Finding], list[LinkSpeed]]:
    """Visit the sites one after the other, since concurrent visits would distort the measurements.

    The first finding is this site's address.
    """
    async with AsyncExitStack() as stack:
        carrier = make_carrier(here.transport, here.identity.node, config.hash(), here.credentials)
        stack.push_async_callback(carrier.stop)
        address, listening = await _listen(here, config, carrier)
        findings, links = list[Finding](), list[LinkSpeed]()
        for where, hello in met.items():
            seen, link = await visit(carrier, where, hello, address)
            findings += seen
            links += [link] if link else []
        return listening, findings, links


async def _listen(here: Standpoint, config: RunConfig, carrier: SiteCarrier) -> tuple[str, Finding]:
    """This site's address: of its daemon or, while none runs, of the doctor; "" if it cannot listen."""
    if here.daemon:
        address = str(here.status["address"])
        return address, Finding(THIS_SITE, "address", Verdict.OK, f"its daemon tells others to reach it at {address}")
    settings, me = here.settings, Site(node=here.identity.node)

    async def answer(_sender: str, _request: HelloRequest) -> HelloReply:
        return HelloReply(protocol=PROTOCOL, run_hash=config.hash(), run_config=config.canonical(), site=me)

    carrier.serve(HELLO, answer)
    try:
        choice = await carrier.listen(settings.listen, settings.advertise, list(here.addresses))
    except PierError as error:
        remedy = f"{error.remedy} If a daemon of yours has that port, name its folder with --data."
        return "", Finding(THIS_SITE, "address", Verdict.PROBLEM, error.problem, remedy)
    return choice.address, Finding(THIS_SITE, "address", Verdict.OK, choice.why)


def _of_this_machine(here: Standpoint, config: RunConfig, sites: int, links: Sequence[LinkSpeed]) -> list[Finding]:
    parameters, folder, stages = Layout.of_run(config).length, here.settings.folder, config.pipeline.stages
    if stages > 1:  # a site holds one of them
        parameters = max(stage_layout(config.model, stages, stage).length for stage in range(stages))
    starts = devices.pick().type == "cpu" and here.daemon is None
    workers = machine.cpu_workers(config, here.settings) if starts else 0
    held = machine.held_memory(here.daemon.pid) if here.daemon else 0
    free = machine.free_disk(folder)
    return [
        machine.stage_disk_finding(here.settings, config, free)
        if stages > 1
        else machine.disk_finding(folder, config, parameters, free, here.daemon is not None),
        machine.memory_finding(config, parameters, workers, held, machine.free_memory()),
        *([] if stages > 1 else _of_replicas(here, config, parameters, sites, links)),
        *machine.idle_finding(machine.forgets_idle_links(), _slowest(links).round_trip),
    ]


def _slowest(links: Sequence[LinkSpeed]) -> Line:
    slowest = min((min(link.up, link.down) for link in links), default=0.0)
    return Line(slowest, max((link.round_trip for link in links), default=0.0))


def _of_replicas(
    here: Standpoint, config: RunConfig, parameters: int, sites: int, links: Sequence[LinkSpeed]
) -> list[Finding]:
    speed, measured = here.status.get("tokens_per_second") or 0.0, here.status.get("utilisation")
    return [
        *machine.workers_findings(config, here.settings),
        *boundary_finding(config, parameters),
        utilisation_finding(config, parameters, sites, _slowest(links), speed, measured),
    ]


@dataclass(frozen=True)
class Standpoint:
    """This site.

    Attributes:
        config: the run; None: only the peers know it.
        credentials: None with --insecure, or if this site will found a run.
        daemon: None: none runs.
        status: the daemon's status, or else that of its last round, or else {}.
        addresses: known addresses of other sites, with their names, which may be empty.
    """

    settings: Settings
    config: RunConfig | None
    identity: Identity
    token: Token | None
    credentials: Credentials | None
    daemon: Running | None
    status: Status
    addresses: dict[str, str]
    transport: Transport

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Read the data folder and the options. Raises PierError: they contradict each other or are incomplete."""
        enrolment = Enrolment.load(settings.folder)
        token = None if enrolment else find_token(settings)  # an enrolled site came with an invite
        config, (transport, record) = known_config(settings), find_site(settings)
        # A site that has no key yet gets one for this examination; it is not kept.
        identity = Identity.load(settings.folder) or Identity.new()
        daemon = find_daemon(settings.folder)
        status = daemon.status() if daemon else last_event(settings.folder)
        addresses = dict.fromkeys(settings.peers, "")
        addresses |= {site.address: site.name for site in record.sites()} if record else {}
        addresses |= {peer["address"]: peer["name"] for peer in status.get("peers", [])}
        proof = credentials(identity, token) if token else None
        if enrolment and not settings.insecure:
            proof = enrolment.credentials(identity)
        here = cls(
            settings=settings.after(record),
            config=None,
            identity=identity,
            token=token,
            credentials=proof,
            daemon=daemon,
            status=status,
            addresses=addresses,
            transport=transport,
        )
        return here.in_run(config) if config else here

    def in_run(self, config: RunConfig) -> Self:
        """The same, once the run is known. Raises PierError: the token belongs to another run."""
        if self.token:
            self.token.require_run(config.hash())
        return replace(self, config=config)
