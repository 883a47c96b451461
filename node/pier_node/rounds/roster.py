"""The roster: every site that this one has heard of, what each last said of itself, and which sites are alive.

The roster asks each peer for its pulse once per INTERVAL, and beyond QUESTIONS peers so much less often that a site
never has more questions to ask. A peer counts as not alive if it fails to answer twice in a row, or if it has been
silent for longer than its own past suggests (median + k·MAD of the gaps between its answers). Silent peers are asked
less and less often.

A site signs its own entry, so that others can pass it on. What a peer says about a third site is hearsay: the roster
accepts it only with that site's own signature, takes only a few such entries from each peer, and forgets a site that
never answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from pier_node.base.patience import LearnedWait
from pier_node.base.tasks import Signal, cancel_and_wait
from pier_node.config.run import SITES
from pier_node.identity.node import Signer
from pier_node.wire.carrier import BEAT, Carrier, PeerLost
from pier_proto.v1.peer_pb2 import Phase, Pulse, Site

_PURPOSE = "site"


def sign_entry(site: Site, signer: Signer, version: int) -> Site:
    """Give a node's own entry a signature and a version, which must be higher than before; return the same entry."""
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
"""Phases in which a site takes part in rounds."""
INTERVAL = 1.0
"""Seconds between two questions to a peer."""
QUESTIONS = 32
"""Most questions per interval to peers that answer: each pulse is compared with those of all others."""
FAILURES = 2
LATE = 10.0
"""Seconds after a commit here; by then every healthy site has the same commit or says that it is catching up."""
CONTACTS = SITES - 1
"""Most peers that a site knows: with the site itself, this is the largest number of sites in a run."""
HEARSAY, HEARSAY_PER_PEER = 64, 16
"""Most peers that are known from hearsay only: in all, and from a single peer."""
SILENT_DIALS = 8
"""Most questions to silent peers per interval, however many there are; up to twice as many may be in flight at once."""
BACKOFF, HEARSAY_BACKOFF = 8, 64
"""Most intervals between two questions to a silent peer (unless there are many of them), and to a hearsay peer."""
SETTLING = 25
"""Intervals after which every peer has answered or failed twice, unless very many are silent."""
FORGOTTEN, PARTICIPANT_FORGOTTEN = 3600.0, 7 * 86400.0
"""Seconds of silence after which a peer is forgotten, and after which a peer that took part in rounds is forgotten."""

log = logging.getLogger(__name__)


@dataclass
class Contact:
    """What this site knows of a peer.

    Attributes:
        limit: longest silence, in seconds, if the peer is asked once per interval.
        told_by: the peer that told us of it; "" if we have met it, or if our own notes or our coordinator name it.
        pulse: what it last said of itself, in a call that proved who was speaking.
        started_at: when it gave a newer entry, as it does when it is started; in seconds of the loop's clock.
        failures: failed calls in a row, in either direction, since it was last heard.
        unanswered: questions in a row that it did not answer.
        participant: whether it was ever in a phase in which it takes part in rounds, in this start or an earlier one.
    """

    site: Site
    limit: LearnedWait
    told_by: str = ""
    pulse: Pulse | None = None
    heard_at: float = 0.0
    started_at: float = -math.inf
    failures: int = 0
    unanswered: int = 0
    participant: bool = False
    last_error: str = ""
    round_trip: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def silent(self) -> bool:
        """Whether it has not answered yet, or has stopped answering."""
        return self.unanswered >= FAILURES or self.pulse is None


class Roster:
    """The sites of the run. `changed` is notified whenever something about them changes.

    Args:
        pulse: returns what this site says of itself now.
        signer: verifies entries; with None, the roster accepts nothing that a peer says of others.

    Attributes:
        barred: sites that no longer belong to the run.
        forgotten: how many peers it has forgotten so far.
    """

    def __init__(self, carrier: Carrier, pulse: Callable[[], Pulse], signer: Signer | None = None) -> None:
        self.node, self._carrier = carrier.node, carrier
        self._pulse, self._signer = pulse, signer
        self.contacts: dict[str, Contact] = {}
        self.barred: set[str] = set()
        self.forgotten = 0
        self._copy_told = False
        self._members: frozenset[str] = frozenset()
        self._silent = asyncio.Semaphore(2 * SILENT_DIALS)
        self._telling: asyncio.Task[None] | None = None
        self.changed = Signal()
        carrier.serve(BEAT, self._answer)

    # --- whom we know --------------------------------------------------------------------------

    def add(self, site: Site, participant: bool = False) -> None:
        """Learn of a site, or of its new address, from itself, our notes or our coordinator; ask for its pulse.

        Args:
            participant: whether the site is known to have taken part in rounds.
        """
        contact = self._take(site if self._is_proper(site) else _unsigned(site), "")
        if contact is not None:
            if contact.silent and site.address and site.address != contact.site.address:
                # Our coordinator signs nothing for others. If the site is there, it says so itself, with its signature.
                self._carrier.introduce(site.node, site.address)
            contact.told_by = ""
            contact.participant |= participant

    def hear(self, sites: Iterable[Site], told_by: str) -> list[Site]:
        """Learn of sites from what a peer says; return those accepted entries that are new.

        An entry without the signature of the site itself is dropped, together with all entries after it.
        """
        new = []
        for site in sites:
            known = self.contacts.get(site.node)
            if site.node == self._carrier.node:
                self._tell_of_copy(site)
                continue
            if not site.address or site.node in self.barred:
                continue
            if known is not None and site.version <= known.site.version:
                continue
            if known is None and not self._has_room_for_hearsay(told_by):
                continue
            if not self._is_proper(site):
                log.debug("%s sent an entry that %s has not signed", self.called(told_by), site.node)
                break
            if self._take(site, told_by) is not None:
                new.append(site)
        return new

    def _tell_of_copy(self, entry: Site) -> None:
        """Log, once, that others know this site by a newer entry than its own, which only its key can sign."""
        mine = self._pulse().site
        newer = entry.version > mine.version and entry.address != mine.address
        if newer and not self._copy_told and self._is_proper(entry):
            self._copy_told = True
            log.error(
                "others know this site at %s, which is not its address: does a copy of its data folder run there? Stop "
                "one of the two, and delete its folder: copies vote twice, and are all put out of the run for that",
                entry.address,
            )

    def has(self, sites: Iterable[Site]) -> bool:
        """Whether this roster has all of these entries or newer ones; of barred sites it needs none."""
        versions = {node: contact.site.version for node, contact in self.contacts.items()}
        known = {self._carrier.node, *self.barred}
        return all(site.node in known or versions.get(site.node, -1) >= site.version for site in sites)

    def keep(self, members: Iterable[str]) -> None:
        """Set the members of the last round: they are never forgotten, and are asked at the full rate when silent."""
        self._members = frozenset(members)

    def known(self) -> list[Site]:
        """Entries of all sites that are known from more than hearsay: these are written to disk and passed on."""
        return [contact.site for contact in self.contacts.values() if not contact.told_by]

    def reached_at(self) -> list[str]:
        """Addresses of the peers that are alive."""
        return [contact.site.address for node, contact in self.contacts.items() if self.alive(node)]

    def _has_room_for_hearsay(self, told_by: str) -> bool:
        informants = [contact.told_by for contact in self.contacts.values() if contact.told_by]
        full = len(self.contacts) >= CONTACTS or len(informants) >= HEARSAY
        return not full and informants.count(told_by) < HEARSAY_PER_PEER

    def _take(self, site: Site, told_by: str) -> Contact | None:
        """Create or update the contact of a site; None if there is no room for it or it is barred."""
        if site.node == self._carrier.node or site.node in self.barred:
            return None
        contact = self.contacts.get(site.node)
        if contact is None:
            if not self._make_room():
                return None
            limit = LearnedWait(initial=10 * INTERVAL, floor=5 * INTERVAL)
            contact = self.contacts[site.node] = Contact(site, limit, told_by)
            contact.heard_at = asyncio.get_running_loop().time()
            if site.address:
                self._carrier.introduce(site.node, site.address)
            contact.task = asyncio.create_task(self._follow(contact), name=f"beat {site.node}")
        elif site.address and self._is_newer(site, contact.site):
            if site.version > contact.site.version:
                contact.started_at = asyncio.get_running_loop().time()
            contact.site = site
            self._carrier.introduce(site.node, site.address)
        return contact

    def _is_newer(self, site: Site, known: Site) -> bool:
        """Whether an entry replaces the known one; an unsigned entry replaces only an unsigned one."""
        return site.version > known.version if site.signature else not known.signature

    def _is_proper(self, site: Site) -> bool:
        return bool(site.signature) and self._signer is not None and is_genuine(site, self._signer)

    def _make_room(self) -> bool:
        """Make room for one more contact: if necessary, forget the one that has been silent the longest."""
        if len(self.contacts) < CONTACTS:
            return True
        silent = [it for it in self.contacts.values() if it.silent and it.site.node not in self._members]
        if not silent:
            return False
        self._forget(min(silent, key=lambda contact: (not contact.told_by, contact.participant, contact.heard_at)))
        return True

    def _forget(self, contact: Contact) -> None:
        del self.contacts[contact.site.node]
        self.forgotten += 1
        self._carrier.forget(contact.site.node)
        if contact.task and contact.task is not asyncio.current_task():
            contact.task.cancel()
        self.changed.notify()

    def bar(self, nodes: Iterable[str], why: str) -> None:
        """Forget these sites for good: they no longer belong to the run."""
        for node in set(nodes) - self.barred:
            self.barred.add(node)
            if contact := self.contacts.get(node):
                log.warning("%s %s", _called(contact.site), why)
                self._forget(contact)

    def goodbye(self, node: str) -> None:
        """Note that a site says it stops, instead of waiting for it to fall silent."""
        if (contact := self.contacts.get(node)) and contact.failures < FAILURES:
            log.info("%s has left", _called(contact.site))
            contact.failures = FAILURES
        self.changed.notify()

    def called(self, node: str) -> str:
        """How messages to people name a site: its name, if it has one, and its node id."""
        if node == self._carrier.node:
            return _called(self._pulse().site)
        contact = self.contacts.get(node)
        return _called(contact.site) if contact else node

    def address(self, node: str) -> str:
        """The address that a site last gave; "" if it is not known."""
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
        """Whether a site has answered lately."""
        if node == self._carrier.node:
            return True
        contact = self.contacts.get(node)
        if contact is None or contact.pulse is None or contact.failures >= FAILURES:
            return False
        return asyncio.get_running_loop().time() - contact.heard_at <= contact.limit.seconds() * self.crowd

    def started_at(self, node: str) -> float:
        """When this site heard that another one was started again, in seconds of the loop's clock; -inf: never."""
        contact = self.contacts.get(node)
        return contact.started_at if contact else -math.inf

    def stayed(self, node: str, since: float) -> bool:
        """Whether a site has answered lately, and was not started again since that time of the loop's clock."""
        return self.alive(node) and self.started_at(node) <= since

    def round_trips(self) -> dict[str, float]:
        """Seconds from question to answer, for each peer that has answered."""
        return {node: it.round_trip for node, it in self.contacts.items() if it.round_trip}

    def participants(self) -> dict[str, Pulse]:
        """Live sites that take part in rounds, this one included, in node-id order, with what each last said."""
        return {node: pulse for node, pulse in self.pulses().items() if pulse.phase in ACTIVE}

    def abreast(self, round: int, committed: float) -> list[str]:
        """Participants that may reach the next round in time.

        This leaves out sites that say they have committed the next round, sites that still train for an earlier round,
        and sites that have not committed `round` LATE seconds after us: a healthy site that is behind is catching up by
        then, and says so.

        Args:
            committed: when this site committed `round`, in seconds of the loop's clock.
        """
        late = asyncio.get_running_loop().time() > committed + LATE * self.crowd
        heard = {node: contact.heard_at for node, contact in self.contacts.items()}
        return [
            node
            for node, pulse in self.participants().items()
            if not _is_elsewhere(pulse, round, late, heard.get(node, math.inf) > committed)
        ]

    def waits(self, node: str) -> bool:
        """Whether a site says that it is waiting for its leader."""
        pulse = self.pulse_of(node)
        return pulse is not None and pulse.phase == Phase.PHASE_WAITING

    def ahead(self, round: int) -> list[str]:
        """Live peers that have committed a later round, the most advanced first."""
        rounds = {node: contact.pulse.round for node, contact in self.contacts.items() if contact.pulse}
        later = [node for node, reached in rounds.items() if reached > round and self.alive(node)]
        return sorted(later, key=lambda node: (-rounds[node], node))

    async def settled(self) -> None:
        """Return once every peer except hearsay has answered or failed to, or after SETTLING intervals."""

        def all_asked() -> bool:
            asked = [contact for contact in self.contacts.values() if not contact.told_by]
            return all(contact.pulse or contact.failures >= FAILURES for contact in asked)

        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLING * INTERVAL):
                await self.changed.until(all_asked)

    async def announce(self) -> None:
        """Tell every live peer our pulse now instead of at the next beat."""
        await asyncio.gather(*(self._ask(contact) for node, contact in self.contacts.items() if self.alive(node)))

    def tell(self) -> None:
        """Tell every live peer our pulse, in the background."""
        if self._telling:
            self._telling.cancel()
        self._telling = asyncio.create_task(self.announce(), name="announce")

    async def stop(self) -> None:
        """Cancel all questions in flight."""
        tasks = [contact.task for contact in self.contacts.values() if contact.task]
        tasks += [self._telling] if self._telling else []
        await cancel_and_wait(*tasks)

    # --- beats ---------------------------------------------------------------------------------

    async def _follow(self, contact: Contact) -> None:
        while True:
            if contact.silent and contact.site.node not in self._members:
                async with self._silent:
                    await self._ask(contact)
            else:
                await self._ask(contact)
            if self._is_forgotten(contact):
                log.info("%s has not answered for a long time and is forgotten", _called(contact.site))
                self._forget(contact)
                return
            await asyncio.sleep(self._pause(contact))

    @property
    def crowd(self) -> float:
        """Intervals between two questions to a peer that answers."""
        return max(1.0, len(self.contacts) / QUESTIONS)

    def _pause(self, contact: Contact) -> float:
        """Seconds until the next question to a peer: longer after every question that it did not answer."""
        if contact.unanswered == 0 or contact.site.node in self._members:
            return INTERVAL * self.crowd if contact.unanswered != 1 else INTERVAL / 4
        if contact.unanswered < FAILURES and not contact.told_by:
            return INTERVAL / 4
        most = HEARSAY_BACKOFF if contact.told_by else BACKOFF
        silent = sum(it.silent for it in self.contacts.values())
        return INTERVAL * max(min(2.0 ** (contact.unanswered - FAILURES), most), silent / SILENT_DIALS)

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
            self._missed(contact, f"it answers as {pulse.site.node}")
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
            contact.limit.saw((now - contact.heard_at) / self.crowd)
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


async def first_away(roster: Roster, nodes: Iterable[str]) -> str:
    """The first of these sites that does not answer any more; a machine that has vanished refuses nothing."""
    watched = [*nodes]
    while True:
        for node in watched:
            if not roster.alive(node):
                return node
        await roster.changed.wait(1.0)


def _is_elsewhere(pulse: Pulse, round: int, late: bool, is_news: bool) -> bool:
    """Whether a site is elsewhere. A pulse from before the commit does not say what the site trains for now."""
    training = is_news and pulse.phase == Phase.PHASE_TRAINING and pulse.training_for <= round
    return training or pulse.round > round or (late and pulse.round < round)


def _unsigned(site: Site) -> Site:
    return Site(node=site.node, name=site.name, address=site.address, slot=site.slot)


def _called(site: Site) -> str:
    return f"{site.name} ({site.node})" if site.name else site.node
