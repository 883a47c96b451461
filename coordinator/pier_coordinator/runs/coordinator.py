"""The coordinator of a run: its state, from the database and the sites, and the operator's actions on it."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from pier_coordinator.experts.execution import ExpertRun
from pier_coordinator.runs.sites import Presence, Registry
from pier_coordinator.store import sites as stored
from pier_coordinator.store.facts import Fact, event
from pier_coordinator.store.store import Store
from pier_coordinator.store.writer import Transaction
from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, config_changes
from pier_node.identity.tls import der
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import total_rounds
from pier_node.rounds.witness import Witness
from pier_proto.v1.coordinator_pb2 import Paths
from pier_proto.v1.peer_pb2 import Phase, Place, Pulse, WitnessReply, WitnessRequest

PULSE_KEYS = ("phase", "round", "inner_step", "tokens", "tokens_per_second", "loss", "validation_loss", "bytes_sent")


def row(site: stored.SiteRow, presence: Presence | None, order: stored.OrderRow) -> dict[str, Any]:
    """A site, what it reported last and its order, as the page's board takes them; what is not known is None.

    `order` is the epoch of the site's newest order, `follows` that of the order that it follows. `place` is its place
    in a pipeline: its stage and what it has measured.
    """
    pulse = presence.pulse if presence else None
    return {
        "node": site.node,
        "name": site.name,
        "alive": presence is not None and presence.alive,
        "offset": presence.offset if presence else None,
        **(_pulse(pulse) if pulse else dict.fromkeys(PULSE_KEYS)),
        "activity": order.activity,
        "assignment": next(iter(order.assignment)),
        "order": order.epoch,
        "follows": presence.follows if presence else 0,
        "place": _place(pulse.place) if pulse and pulse.HasField("place") else None,
    }


def _pulse(pulse: Pulse) -> dict[str, Any]:
    told = {key: getattr(pulse, key) for key in PULSE_KEYS}
    losses = {key: None if math.isnan(told[key]) else told[key] for key in ("loss", "validation_loss")}
    return {**told, **losses, "phase": Phase.Name(pulse.phase).removeprefix("PHASE_").lower()}


def _place(place: Place) -> dict[str, Any]:
    times = {key: getattr(place, key) for key in ("forward", "backward", "loss")}
    ways = {"transfer": dict(place.transfer), "round_trip": dict(place.round_trip)}
    return {"stage": place.stage, "memory": place.memory, **times, **ways}


CONFIG = "config"
EXPIRY_SECONDS = 1.0
TIDY_SECONDS = 10.0

log = logging.getLogger(__name__)


class Coordinator:
    """Coordinates one run.

    Attributes:
        sites: every site that was ever enrolled, by node id.
        orders: the newest order to each site, by node id.
        experts: the current plan of experts and its progress.
        revoked: node ids of the revoked sites, the latest last.
        revocations: version of that list; 0: no site was revoked yet.
        invites: the invites whose holders may connect, by their certificate (DER).
        witness: gives the coordinator's vote; None: the run has no witness.
        invites_changed: called with the certificates of `invited` whenever they change.

    Args:
        wall: returns the time in seconds since the epoch.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.config = config
        self.run_hash = config.hash()
        self.wall, self.clock = wall, clock
        self.registry = Registry(clock, wall)
        self.sites: dict[str, stored.SiteRow] = {site.node: site for site in store.sites()}
        self.orders: dict[str, stored.OrderRow] = {order.node: order for order in store.orders()}
        self.revoked = store.revoked()
        self.revocations = int(store.meta(stored.REVOCATIONS) or 0)
        self.invites: dict[bytes, stored.InviteRow] = {}
        self.invites_changed: Callable[[Collection[bytes]], None] = lambda _: None
        self.witness: Witness | None = None
        self._voted = "", 0
        self._unwritten = dict[str, tuple[bool, Fact]]()
        self.experts = ExpertRun(self)
        self.look_at_invites()
        self.registry.restore(self.sites.values())

    async def begin(self) -> None:
        """Store the run's configuration, or check that it is the one in the database. Raises PierError."""
        known = self.store.meta(CONFIG)
        if known is None:
            await self.store.do(_begin, self.config, self.wall())
        elif known != self.config.canonical():
            raise PierError(
                f"run.toml has changed since the run began: {config_changes(known, self.config.canonical())}",
                "Sites have what it said then. Undo it, or start another run in a new folder (pier-coordinator init).",
            )

    async def watch_over(self) -> None:
        """Detect silent sites, look at the experts and tidy the database, until cancelled."""
        tidying = self.clock() + TIDY_SECONDS
        while True:
            try:
                await self.expire()
                await self._look_at_experts()
                if self.clock() >= tidying:
                    await self.store.tidy()
                    tidying = self.clock() + TIDY_SECONDS
            except sqlite3.Error as error:  # the disk may have room again later
                if not self.store.problem:  # the store has said that
                    log.error("the database could not be read or tidied: %s", error)
            await asyncio.sleep(EXPIRY_SECONDS)

    async def _look_at_experts(self) -> None:
        try:
            await self.experts.look(time.monotonic())
        except sqlite3.Error:
            raise
        except Exception:  # a problem with one plan must not end the coordinator
            log.exception("the plan of experts could not be looked at; it is tried again")

    async def expire(self) -> None:
        """Record the sites that have fallen silent, and what the database refused before."""
        if (silent := self.registry.expire()) or self._unwritten:
            await self.note_presence(True, silent)

    async def note_presence(self, gone: bool, events: Iterable[Fact]) -> None:
        """Record that sites fell silent or came back. What the database refuses is kept, the newest of each site."""
        noted, self._unwritten = self._unwritten | {it.node: (gone, it) for it in events}, {}
        try:
            await self.store.do(stored.note_presence, noted.values())
        except sqlite3.Error:
            self._unwritten = noted | self._unwritten
            raise

    # --- the operator's actions ----------------------------------------------------------------

    async def order(
        self, activity: stored.Activity, sites: Collection[str] | None = None, by: str = stored.OPERATOR
    ) -> list[stored.OrderRow]:
        """Order sites to pause at the next round boundary, to train, or to leave the run and end.

        Args:
            sites: names or node ids; None: all sites.
            by: who gives the order.

        Raises:
            Refused: the run has no site of that name.
        """
        return await self._order(sites, activity, None, by)

    async def assign(self, assignment: dict[str, Any], sites: Collection[str] | None = None) -> list[stored.OrderRow]:
        """Give sites another assignment, in the JSON form of the message. Raises Refused."""
        return await self._order(sites, None, assignment, stored.OPERATOR)

    async def revoke(self, site: str) -> stored.SiteRow:
        """Revoke a site, by name or node id, for good, and the invite that it joined with. Raises Refused."""
        (node,) = self._nodes([site])
        try:
            revoked = self.sites[node] = await self.store.do(stored.revoke, node, self.wall())
        except stored.Stranger as error:  # it was revoked meanwhile
            raise stored.Refused(str(error)) from error
        self.revoked.append(node)
        self.revocations = int(self.store.meta(stored.REVOCATIONS) or 0)
        self.registry.remove(node)
        self.look_at_invites()
        return revoked

    async def invite(self, invite: stored.InviteRow) -> None:
        """Add an invite. Raises Refused: too many invites are open, or one for a site of this name is."""
        await self.store.do(stored.add_invite, invite)
        self.look_at_invites()

    async def revoke_invite(self, invite: str) -> stored.InviteRow:
        """Revoke an invite. Raises Refused."""
        revoked = await self.store.do(stored.revoke_invite, invite, self.wall())
        self.look_at_invites()
        return revoked

    def nodes(self) -> list[dict[str, Any]]:
        """The sites of the run: see `row`."""
        here = [site for site in self.sites.values() if site.revoked_at is None]
        return [row(site, self.registry.get(site.node), self.orders[site.node]) for site in here]

    def stage_of(self, site: str) -> int | None:
        """The stage that a site (name or node id) holds; None: none, or not known. Raises Refused: no such site."""
        (node,) = self._nodes([site])
        presence = self.registry.get(node)
        pulse = presence.pulse if presence else None
        return pulse.place.stage if pulse and pulse.HasField("place") else None

    def paths(self) -> Paths | None:
        """The newest paths that a live site has planned for a pipeline, not parsed yet; None: there are none."""
        here = (it for it in map(self.registry.get, self.sites) if it and it.alive)
        return max((it.paths for it in here if it.paths), key=lambda it: it.round, default=None)

    async def _order(
        self,
        sites: Collection[str] | None,
        activity: stored.Activity | None,
        assignment: dict[str, Any] | None,
        by: str,
    ) -> list[stored.OrderRow]:
        nodes = None if sites is None else self._nodes(sites)
        orders = await self.store.do(stored.set_order, nodes, activity, assignment, self.wall(), by)
        for order in orders:
            self.orders[order.node] = order
            if presence := self.registry.get(order.node):
                presence.notify()
        return orders

    def look_at_invites(self) -> None:
        """Reload the invites after some were made, used or revoked."""
        self.invites = {der(each.certificate): each for each in stored.trusted(self.store.invites(), self.wall())}
        self.invites_changed(self.invited())

    def invited(self) -> list[bytes]:
        """The certificates (PEM) with which holders of invites may connect."""
        return [invite.certificate for invite in self.invites.values()]

    def _nodes(self, sites: Collection[str]) -> list[str]:
        by_name = {site.name: site.node for site in self.sites.values() if site.revoked_at is None}
        nodes = {node: node for node in by_name.values()} | by_name
        for site in sites:
            if site not in nodes:
                raise stored.Refused(
                    f"there is no site {site!a} in this run: {', '.join(sorted(by_name)) or 'it has none yet'}"
                )
        return [nodes[site] for site in sites]

    # --- what sites need -----------------------------------------------------------------------

    def member(self, node: str) -> stored.SiteRow:
        """The site with this node id, which must be of the run. Raises Stranger."""
        return stored.member(self.sites.get(node), node)

    async def vote(self, node: str, request: WitnessRequest) -> WitnessReply:
        """The answer of the run's witness to a site. Raises Refused, BadMessage."""
        if self.witness is None:
            raise stored.Refused("run.witness is not set: this run has no witness")
        founder = self.store.meta(stored.FOUNDER)
        if not founder:
            raise stored.Refused("this run has no founder yet")
        try:
            reply = await asyncio.to_thread(self.witness.answer, node, request, founder)
        except PierError as error:  # the disk may have room again later
            log.error("%s", error)
            return WitnessReply(reason=error.problem)
        try:
            await self._note_vote(node, reply)
        except sqlite3.Error as error:  # a vote is given all the same
            log.error("what the witness answered cannot be noted: %s", error)
        return reply

    async def _note_vote(self, node: str, reply: WitnessReply) -> None:
        if self.store.meta(stored.WITNESS) is None:
            await self.store.do(stored.put_meta, stored.WITNESS, "asked")
        if reply.HasField("handover") and self._voted != (node, reply.trusted):
            self._voted, name = (node, reply.trusted), self.sites[node].name
            told = f"the coordinator gave {name} its vote for round {reply.trusted}: half of the members are missing"
            await self.store.add_facts([event(self.wall(), told, node, level=logging.WARNING)])

    def stands(self, standing: stored.Standing) -> stored.SiteRow:
        """Update a site and its order from the database; return the site."""
        self.orders[standing.site.node] = standing.order
        self.sites[standing.site.node] = standing.site
        return standing.site


def _begin(transaction: Transaction, config: RunConfig, now: float) -> None:
    stored.put_meta(transaction, CONFIG, config.canonical())
    transaction.add([run_fact(config, now)])


def run_fact(config: RunConfig, now: float) -> Fact:
    """The first fact of a run: its configuration."""
    body = {
        "name": config.run.name,
        "run_hash": config.hash().hex(),
        "algorithm": config.outer.algorithm,
        "rounds": total_rounds(config),
        "total_steps": config.inner.total_steps,
        "sites": config.run.sites,
        "codec": config.outer.codec,
        "inner_steps": config.outer.inner_steps,
        "stages": config.pipeline.stages,
        "parameters": Layout.of_run(config).length,
    }
    return Fact(now, "run", "", body)
