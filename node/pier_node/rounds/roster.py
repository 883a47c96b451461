"""Who is in the run: every site this one has heard of, what each last said of itself, and who is alive.

Each peer is asked for its pulse once an `interval`; a peer that did not answer for longer than its own past suggests
(median + k·MAD of the gaps between its answers) is not alive, and neither is one that failed twice in a row.

What a peer says of a third site is hearsay: it is taken only with that site's own signature, only a few entries are
taken from each peer, and a site that never answers is forgotten. Peers that are silent are asked less and less often.

A site's entry in the rosters of the run, signed by the site itself, so that others can pass it on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from pier_node.base.tasks import Signal
from pier_node.config.run import SITES
from pier_node.identity.signing import Signer
from pier_node.outer.deadline import Deadline
from pier_node.wire.carrier import BEAT, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

_PURPOSE = "site"


def sign_entry(site: Site, signer: Signer, version: int) -> Site:
    """Give a node's own entry a version, higher than any before, and its signature; returns the same entry."""
    site.version = version
    site.public = signer.public
    site.signature = signer.sign(_PURPOSE, _statement(site))
    return site


def is_genuine(site: Site, signer: Signer) -> bool:
    """Whether the node that an entry names has signed it, for the signer's run."""
    return signer.verifies(site.node, site.public, site.signature, _PURPOSE, _statement(site))


def _statement(site: Site) -> bytes:
    stated = Site()
    stated.CopyFrom(site)
    stated.ClearField("public")
    stated.ClearField("signature")
    return stated.SerializeToString(deterministic=True)


ACTIVE = frozenset({Phase.PHASE_TRAINING, Phase.PHASE_WAITING, Phase.PHASE_EXCHANGING})
"""Phases of a site that takes part in rounds."""
FAILURES = 2
LATE = 10.0
"""Seconds after a commit here within which whoever is well has it too, or says that it is catching up."""
CONTACTS = SITES - 1
"""Most peers that a site knows: with itself, the most sites of a run."""
HEARSAY, HEARSAY_PER_PEER = 64, 16
"""Most peers that are known only from what others say, and from what one of them says."""
SILENT_DIALS = 8
"""Most questions to silent peers in an interval, and twice as many under way at once, however many there are."""
BACKOFF, HEARSAY_BACKOFF = 8, 64
"""Most intervals between two questions to a silent peer, unless there are many; to one known from hearsay."""
SETTLING = 25
"""Intervals within which every peer has answered or failed twice, unless very many are silent."""
FORGOTTEN, PARTICIPANT_FORGOTTEN = 3600.0, 7 * 86400.0
"""Seconds of silence after which a peer is forgotten; after which one that took part in rounds is."""

log = logging.getLogger(__name__)


@dataclass
class Contact:
    """What this site knows of a peer.

    Attributes:
        told_by: the peer that told of it; "": it was met, or this site's own notes or its coordinator name it.
        pulse: what it last said of itself, in a call that proved who speaks.
        failures: in a row, until it is heard, whichever of the two asks.
        unanswered: questions in a row that it did not answer.
        participant: it was in a phase in which it takes part in rounds, in this start of this site or one before.
    """

    site: Site
    limit: Deadline
    told_by: str = ""
    pulse: Pulse | None = None
    heard_at: float = 0.0
    failures: int = 0
    unanswered: int = 0
    participant: bool = False
    last_error: str = ""
    round_trip: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def silent(self) -> bool:
        """Whether it has not answered yet, or does not any more."""
        return self.unanswered >= FAILURES or self.pulse is None


class Roster:
    """The sites of the run. `changed` is notified whenever something about them is new.

    Args:
        pulse: what this site says of itself now.
        interval: seconds between two questions to a peer.
        signer: verifies entries; None: nothing that a peer says of others is taken.
    """

    def __init__(
        self, carrier: Carrier, pulse: Callable[[], Pulse], interval: float = 1.0, signer: Signer | None = None
    ) -> None:
        self.node = carrier.node
        self._carrier = carrier
        self._pulse = pulse
        self._interval = interval
        self._signer = signer
        self.contacts: dict[str, Contact] = {}
        self._barred: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._silent = asyncio.Semaphore(2 * SILENT_DIALS)
        self._telling: asyncio.Task[None] | None = None
        self.changed = Signal()
        carrier.serve(BEAT, self._answer)

    # --- whom we know --------------------------------------------------------------------------

    def add(self, site: Site, participant: bool = False) -> None:
        """Learn of a site, or of its new address, from itself, our notes or our coordinator, and ask for its pulse.

        Args:
            participant: it is known to have taken part in rounds.
        """
        contact = self._take(site if self._is_proper(site) else _unsigned(site), "")
        if contact is not None:
            contact.told_by = ""
            contact.participant |= participant

    def hear(self, sites: Iterable[Site], told_by: str) -> list[Site]:
        """Learn of sites from what a peer says; returns the entries that are new, of those that are taken.

        Nothing is taken without the signature of the site itself; what follows an entry without one is not looked at.
        """
        new = []
        for site in sites:
            known = self.contacts.get(site.node)
            if not site.address or site.node in self._barred or site.node == self._carrier.node:
                continue
            if known is not None and site.version <= known.site.version:
                continue
            if known is None and not self._has_room_for_hearsay(told_by):
                continue
            if not self._is_proper(site):
                log.debug("%s passes on an entry that %s has not signed", self.called(told_by), site.node)
                break
            if self._take(site, told_by) is not None:
                new.append(site)
        return new

    def keep(self, members: Iterable[str]) -> None:
        """Members of the last round: they are never forgotten, and asked as often when they are silent."""
        self._members = frozenset(members)

    def known(self) -> list[Site]:
        """The entries of all that are known from more than hearsay: what is noted on the disk, and passed on."""
        return [contact.site for contact in self.contacts.values() if not contact.told_by]

    def reached_at(self) -> list[str]:
        """Addresses of those that are alive."""
        return [contact.site.address for node, contact in self.contacts.items() if self.alive(node)]

    def _has_room_for_hearsay(self, told_by: str) -> bool:
        aggregators = [contact.told_by for contact in self.contacts.values() if contact.told_by]
        full = len(self.contacts) >= CONTACTS or len(aggregators) >= HEARSAY
        return not full and aggregators.count(told_by) < HEARSAY_PER_PEER

    def _take(self, site: Site, told_by: str) -> Contact | None:
        """The contact of a site, made or brought up to date; None: there is no room, or it is not wanted."""
        if site.node == self._carrier.node or site.node in self._barred:
            return None
        contact = self.contacts.get(site.node)
        if contact is None:
            if not self._make_room():
                return None
            limit = Deadline(initial=10 * self._interval, floor=5 * self._interval)
            contact = self.contacts[site.node] = Contact(site, limit, told_by)
            contact.heard_at = asyncio.get_running_loop().time()
            if site.address:
                self._carrier.introduce(site.node, site.address)
            contact.task = asyncio.create_task(self._follow(contact), name=f"beat {site.node}")
        elif site.address and self._is_newer(site, contact.site):
            contact.site = site
            self._carrier.introduce(site.node, site.address)
        return contact

    def _is_newer(self, site: Site, known: Site) -> bool:
        """Whether an entry replaces the one that is known; an unsigned one replaces unsigned ones only."""
        return site.version > known.version if site.signature else not known.signature

    def _is_proper(self, site: Site) -> bool:
        return bool(site.signature) and self._signer is not None and is_genuine(site, self._signer)

    def _make_room(self) -> bool:
        """Have room for one more contact, at the cost of the one that was silent for longest if need be."""
        if len(self.contacts) < CONTACTS:
            return True
        silent = [it for it in self.contacts.values() if it.silent and it.site.node not in self._members]
        if not silent:
            return False
        self._forget(min(silent, key=lambda contact: (not contact.told_by, contact.participant, contact.heard_at)))
        return True

    def _forget(self, contact: Contact) -> None:
        del self.contacts[contact.site.node]
        self._carrier.forget(contact.site.node)
        if contact.task and contact.task is not asyncio.current_task():
            contact.task.cancel()
        self.changed.notify()

    def bar(self, nodes: Iterable[str], why: str) -> None:
        """Forget these sites for good: they are not of the run any more."""
        for node in set(nodes) - self._barred:
            self._barred.add(node)
            if contact := self.contacts.get(node):
                log.warning("%s %s", _called(contact.site), why)
                self._forget(contact)

    def farewell(self, node: str) -> None:
        """A site says that it stops: do not wait for it to fall silent."""
        if (contact := self.contacts.get(node)) and contact.failures < FAILURES:
            log.info("%s has left", _called(contact.site))
            contact.failures = FAILURES
        self.changed.notify()

    def called(self, node: str) -> str:
        """A site as people are told of it: its name, if it has one, and its node id."""
        if node == self._carrier.node:
            return _called(self._pulse().site)
        contact = self.contacts.get(node)
        return _called(contact.site) if contact else node

    def address(self, node: str) -> str:
        """Where a site is reached, as it last said; "": not known."""
        contact = self.contacts.get(node)
        return contact.site.address if contact else ""

    def pulse_of(self, node: str) -> Pulse | None:
        """What a site last said of itself."""
        if node == self._carrier.node:
            return self._pulse()
        contact = self.contacts.get(node)
        return contact.pulse if contact else None

    def pulses(self) -> dict[str, Pulse]:
        """What each live site last said of itself, this one included, in node-id order."""
        known = sorted([*self.contacts, self._carrier.node])
        return {node: pulse for node in known if self.alive(node) and (pulse := self.pulse_of(node))}

    def alive(self, node: str) -> bool:
        """Whether a site answered lately."""
        if node == self._carrier.node:
            return True
        contact = self.contacts.get(node)
        if contact is None or contact.pulse is None or contact.failures >= FAILURES:
            return False
        return asyncio.get_running_loop().time() - contact.heard_at <= contact.limit.seconds()

    def round_trips(self) -> dict[str, float]:
        """Seconds from a question to a peer's answer, of those that have answered."""
        return {node: it.round_trip for node, it in self.contacts.items() if it.round_trip}

    def participants(self) -> dict[str, Pulse]:
        """Live sites that take part in rounds, this one included, in node-id order, and what they last said."""
        return {node: pulse for node, pulse in self.pulses().items() if pulse.phase in ACTIVE}

    def abreast(self, round: int, committed: float) -> list[str]:
        """Participants that may come to the next round in time.

        Not those that say they have committed it; nor those that still train for an earlier one; nor those that have
        not taken `round` some seconds after we have: whoever is well and behind is catching up by then, and says so.

        Args:
            committed: when this site committed `round`, by the loop's clock.
        """
        late = asyncio.get_running_loop().time() > committed + LATE
        heard = {node: contact.heard_at for node, contact in self.contacts.items()}
        return [
            node
            for node, pulse in self.participants().items()
            if not _is_elsewhere(pulse, round, late, heard.get(node, math.inf) > committed)
        ]

    def waits(self, node: str) -> bool:
        """Whether a site says that it waits for its leader."""
        pulse = self.pulse_of(node)
        return pulse is not None and pulse.phase == Phase.PHASE_WAITING

    def ahead(self, round: int) -> list[str]:
        """Live peers that have committed a later round, the most advanced first."""
        rounds = {node: contact.pulse.round for node, contact in self.contacts.items() if contact.pulse}
        later = [node for node, reached in rounds.items() if reached > round and self.alive(node)]
        return sorted(later, key=lambda node: (-rounds[node], node))

    async def settled(self) -> None:
        """Return once every peer, but for hearsay, has answered or has failed to, or after SETTLING."""

        def all_asked() -> bool:
            asked = [contact for contact in self.contacts.values() if not contact.told_by]
            return all(contact.pulse or contact.failures >= FAILURES for contact in asked)

        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLING * self._interval):
                await self.changed.until(all_asked)

    async def announce(self) -> None:
        """Tell every live peer our pulse now rather than at the next beat."""
        await asyncio.gather(*(self._ask(contact) for node, contact in self.contacts.items() if self.alive(node)))

    def tell(self) -> None:
        """The same, without waiting for anybody."""
        if self._telling:
            self._telling.cancel()
        self._telling = asyncio.create_task(self.announce(), name="announce")

    async def stop(self) -> None:
        """End all questions."""
        tasks = [contact.task for contact in self.contacts.values() if contact.task]
        tasks += [self._telling] if self._telling else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- beats ---------------------------------------------------------------------------------

    async def _follow(self, contact: Contact) -> None:
        while True:
            if contact.silent and contact.site.node not in self._members:
                async with self._silent:
                    await self._ask(contact)
            else:
                await self._ask(contact)
            if self._is_forgotten(contact):
                log.info("%s has not answered for long, and is forgotten", _called(contact.site))
                self._forget(contact)
                return
            await asyncio.sleep(self._pause(contact))

    def _pause(self, contact: Contact) -> float:
        """Seconds until the next question to a peer: longer after every one that it did not answer."""
        if contact.unanswered == 0 or contact.site.node in self._members:
            return self._interval if contact.unanswered != 1 else self._interval / 4
        if contact.unanswered < FAILURES and not contact.told_by:
            return self._interval / 4
        most = HEARSAY_BACKOFF if contact.told_by else BACKOFF
        silent = sum(it.silent for it in self.contacts.values())
        return self._interval * max(min(2.0 ** (contact.unanswered - FAILURES), most), silent / SILENT_DIALS)

    def _is_forgotten(self, contact: Contact) -> bool:
        if contact.site.node in self._members or not contact.silent:
            return False
        most = PARTICIPANT_FORGOTTEN if contact.participant else FORGOTTEN
        return asyncio.get_running_loop().time() - contact.heard_at > most

    async def _ask(self, contact: Contact) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            pulse = await self._carrier.call(contact.site.node, BEAT, self._pulse(), contact.limit.seconds())
        except PeerLost as lost:
            self._missed(contact, lost.reason)
            return
        if pulse.site.node != contact.site.node:
            self._missed(contact, f"it answers in the name of {pulse.site.node}")
            return
        contact.round_trip = loop.time() - asked_at
        contact.unanswered = 0
        self.add(pulse.site)
        self._heard(pulse)

    async def _answer(self, sender: str, pulse: Pulse) -> Pulse:
        if pulse.site.node == sender:
            self.add(pulse.site)
            self._heard(pulse)
        return self._pulse()

    def _heard(self, pulse: Pulse) -> None:
        contact = self.contacts.get(pulse.site.node)
        if contact is None:
            return
        now = asyncio.get_running_loop().time()
        if contact.pulse is not None and contact.failures == 0:
            contact.limit.saw(now - contact.heard_at)
        if contact.failures >= FAILURES and pulse.phase in ACTIVE:
            log.info("%s is back", _called(contact.site))
        contact.heard_at, contact.pulse, contact.told_by = now, pulse, ""
        contact.participant |= pulse.phase in ACTIVE
        if pulse.phase != Phase.PHASE_LEAVING:
            contact.failures = 0
        self.changed.notify()

    def _missed(self, contact: Contact, reason: str) -> None:
        contact.failures += 1
        contact.unanswered += 1
        contact.last_error = reason
        if contact.failures == FAILURES and not contact.told_by:
            level = logging.WARNING if contact.participant else logging.INFO
            log.log(level, "%s does not answer: %s", _called(contact.site), reason)
        if contact.failures <= FAILURES:
            self.changed.notify()


def _is_elsewhere(pulse: Pulse, round: int, late: bool, is_news: bool) -> bool:
    """What a member of the last round said before that was committed does not tell what it trains for now."""
    training = is_news and pulse.phase == Phase.PHASE_TRAINING and pulse.training_for <= round
    return training or pulse.round > round or (late and pulse.round < round)


def _unsigned(site: Site) -> Site:
    return Site(node=site.node, name=site.name, address=site.address, slot=site.slot)


def _called(site: Site) -> str:
    return f"{site.name} ({site.node})" if site.name else site.node
