"""Who is in the run: every site this one has heard of, what each last said of itself, and who is alive.

Each peer is asked for its pulse once an `interval`; a peer that did not answer for longer than its own past suggests
(median + k·MAD of the gaps between its answers) is not alive, and neither is one that failed twice in a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pier.v1.peer_pb2 import Phase, Pulse, Site
from pier_node.outer.deadline import Deadline
from pier_node.signals import Signal
from pier_node.wire.carrier import BEAT, Carrier, PeerLost

ACTIVE = frozenset({Phase.PHASE_TRAINING, Phase.PHASE_WAITING, Phase.PHASE_EXCHANGING})
"""Phases of a site that takes part in rounds."""
FAILURES = 2
LATE = 10.0
"""Seconds after a commit here within which whoever is well has it too, or says that it is catching up."""

log = logging.getLogger(__name__)


@dataclass
class Contact:
    """What this site knows of a peer."""

    site: Site
    limit: Deadline
    pulse: Pulse | None = None
    heard_at: float = 0.0
    failures: int = 0
    last_error: str = ""
    round_trip: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Roster:
    """The sites of the run. `changed` is notified whenever something about them is new.

    Args:
        pulse: what this site says of itself now.
        interval: seconds between two questions to a peer.
    """

    def __init__(self, carrier: Carrier, pulse: Callable[[], Pulse], interval: float = 1.0) -> None:
        self._carrier = carrier
        self._pulse = pulse
        self._interval = interval
        self.contacts: dict[str, Contact] = {}
        self._barred: set[str] = set()
        self._telling: asyncio.Task[None] | None = None
        self.changed = Signal()
        carrier.serve(BEAT, self._answer)

    def add(self, site: Site) -> None:
        """Learn of a site, or of its new address; ask it for its pulse from now on."""
        if site.node == self._carrier.node or site.node in self._barred:
            return
        contact = self.contacts.get(site.node)
        if contact is None:
            limit = Deadline(initial=10 * self._interval, floor=5 * self._interval)
            contact = self.contacts[site.node] = Contact(site, limit)
            contact.heard_at = asyncio.get_running_loop().time()
        if contact.task is None:
            contact.task = asyncio.create_task(self._follow(contact), name=f"beat {site.node}")
        if site.address:
            contact.site = site
            self._carrier.introduce(site.node, site.address)

    def bar(self, nodes: Iterable[str]) -> None:
        """Forget these sites for good: they are not of the run any more."""
        for node in set(nodes) - self._barred:
            self._barred.add(node)
            if contact := self.contacts.pop(node, None):
                log.warning("%s was revoked by the run's operator", _called(contact.site))
                if contact.task:
                    contact.task.cancel()
                self.changed.notify()

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
        return [node for node, pulse in self.participants().items() if not _is_elsewhere(pulse, round, late)]

    def waits(self, node: str) -> bool:
        """Whether a site says that it waits for its keeper."""
        pulse = self.pulse_of(node)
        return pulse is not None and pulse.phase == Phase.PHASE_WAITING

    def ahead(self, round: int) -> list[str]:
        """Live peers that have committed a later round, the most advanced first."""
        rounds = {node: contact.pulse.round for node, contact in self.contacts.items() if contact.pulse}
        later = [node for node, reached in rounds.items() if reached > round and self.alive(node)]
        return sorted(later, key=lambda node: (-rounds[node], node))

    async def settled(self) -> None:
        """Return once every known peer has answered, or has failed to."""
        await self.changed.until(
            lambda: all(contact.pulse or contact.failures >= FAILURES for contact in self.contacts.values())
        )

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

    async def _follow(self, contact: Contact) -> None:
        while True:
            await self._ask(contact)
            await asyncio.sleep(self._interval if contact.failures != 1 else self._interval / 4)

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
        contact.heard_at, contact.pulse = now, pulse
        if pulse.phase != Phase.PHASE_LEAVING:
            contact.failures = 0
        self.changed.notify()

    def _missed(self, contact: Contact, reason: str) -> None:
        contact.failures += 1
        contact.last_error = reason
        if contact.failures == FAILURES:
            log.warning("%s does not answer: %s", _called(contact.site), reason)
        self.changed.notify()


def _is_elsewhere(pulse: Pulse, round: int, late: bool) -> bool:
    training = pulse.phase == Phase.PHASE_TRAINING and pulse.training_for <= round
    return training or pulse.round > round or (late and pulse.round < round)


def _called(site: Site) -> str:
    return f"{site.name} ({site.node})" if site.name else site.node
