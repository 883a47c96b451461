"""Standing in a run of pairs: which sites count, and how far the run is.

There is no quorum here that admits a site. A site has standing if the run's founder has met it for a step, or a site
that has standing itself. Whoever meets a site signs a `Vouch` for it, and a site shows the chain of vouches from the
founder to itself in every pulse. Whoever has no more than the run's token is a stranger: it can meet a site, but is not
asked for a state, and nothing that it says of its round moves anybody.

A site with standing may lie too. So the run is as far as half of the others are, not as far as one of them says.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pier_node.rounds.roster import CONTACTS, Roster
from pier_node.rounds.statements import Statements
from pier_node.wire.bounds import VOUCHES
from pier_node.wire.carrier import BadMessage
from pier_proto.v1.peer_pb2 import Pulse, Signed, Vouch

AHEAD = 8
"""A site that says it is further ahead of the run than this is not asked for its state."""

READ_SECONDS = 1.0

log = logging.getLogger(__name__)

Chain = Sequence[Signed]


class Standing:
    """The standing of the sites on a roster, this one included.

    Args:
        founder: node id of the run's founder; "": this site was not told, and every site has standing.
        draw: orders whom to ask for a state; a liar must not foresee it.
    """

    def __init__(self, roster: Roster, founder: str, statements: Statements, draw: random.Random | None = None) -> None:
        self.node, self.roster, self._founder, self._statements = roster.node, roster, founder, statements
        self._draw = draw or random.SystemRandom()
        self._read: dict[str, _Read] = {}

    def has(self, node: str) -> bool:
        """Whether a site has standing: a chain leads from the founder to it, over none that was put out."""
        if node == self._founder or not self._founder:
            return True
        pulse = self.roster.pulse_of(node)
        return pulse is not None and self._reading(node, pulse).leads and self._holds(pulse.vouches)

    def peers(self) -> dict[str, Pulse]:
        """The other live sites that have standing and a state, with what each last said of itself."""
        pulses = self.roster.pulses().items()
        return {node: pulse for node, pulse in pulses if node != self.node and pulse.digest and self.has(node)}

    def reached(self) -> int:
        """The round that at least half of these peers have reached; -1 if there are none."""
        rounds = sorted(pulse.round for pulse in self.peers().values())
        return rounds[(len(rounds) - 1) // 2] if rounds else -1

    def beyond(self, round: int) -> list[str]:
        """The peers that are beyond a round, if the run is, and not so far that only they say so; in random order."""
        reached = self.reached()
        if reached <= round:
            return []
        beyond = [node for node, pulse in self.peers().items() if round < pulse.round <= reached + AHEAD]
        return self._draw.sample(beyond, len(beyond))

    def holders(self, digest: bytes) -> list[str]:
        """The live peers that say they have a state of this digest, whether or not they have standing."""
        return [node for node, pulse in self.roster.pulses().items() if pulse.digest == digest and node != self.node]

    def participants(self) -> tuple[list[str], list[str]]:
        """The sites that take part in rounds, this one included, in node-id order: with standing, and strangers."""
        nodes = {*self.roster.participants(), self.node}
        known = {node for node in nodes if self.has(node)}
        return sorted(known), sorted(nodes - known)

    def vouch(self, partner: str, round: int) -> Signed | None:
        """This site's vouch for a partner; None if it has no standing, or at the end of too long a chain."""
        own = self._own_chain()
        if not self._founder or not self.has(self.node) or len(own) >= VOUCHES:
            return None
        return self._statements.seal(Vouch(node=self.node, partner=partner, round=round))

    def better(self, partner: str, vouch: Signed) -> Chain | None:
        """The chain that a partner's vouch makes for this site; None if this site has as good a one.

        Raises BadMessage if the vouch is another site's, or the chain that it follows proves nothing.
        """
        node, own = self.node, self._own_chain()
        if node == self._founder or not self._founder:
            return None
        pulse = self.roster.pulse_of(partner)
        chain = [*(pulse.vouches if pulse and partner != self._founder else ()), vouch]
        if self.has(node) and len(chain) >= len(own):
            return None
        if not (leads(self._founder, node, chain, self._statements) and self._holds(chain)):
            raise BadMessage(f"a vouch of {partner} that gives no standing")
        return chain

    def _own_chain(self) -> Chain:
        pulse = self.roster.pulse_of(self.node)
        return pulse.vouches if pulse else ()

    def _holds(self, chain: Chain) -> bool:
        return not self.roster.barred.intersection(signed.node for signed in chain[1:])

    def _reading(self, node: str, pulse: Pulse) -> _Read:
        """What a site's chain proves. Signatures are read when the chain changes, at most once in READ_SECONDS."""
        now, read = asyncio.get_running_loop().time(), self._read.get(node)
        just_read = read is not None and node != self.node and now < read.at + READ_SECONDS
        if read is not None and (just_read or read.pulse is pulse):
            return read
        raw = b"".join(signed.SerializeToString(deterministic=True) for signed in pulse.vouches)
        same = read is not None and read.raw == raw
        proven = read.leads if read and same else leads(self._founder, node, pulse.vouches, self._statements)
        if len(self._read) > 2 * CONTACTS:  # of sites that are forgotten
            self._read = {it: known for it, known in self._read.items() if it in self.roster.contacts}
        found = self._read[node] = _Read(pulse, now, raw, proven)
        return found


@dataclass(frozen=True)
class _Read:
    """What was found in a pulse: whether its chain leads from the founder to its site."""

    pulse: Pulse
    at: float
    raw: bytes
    leads: bool


def leads(founder: str, node: str, chain: Chain, statements: Statements) -> bool:
    """Whether these vouches lead from a run's founder to a site."""
    end = founder
    for signed in chain[:VOUCHES]:
        try:
            vouch = statements.read(Vouch, signed)
        except BadMessage as bad:
            log.debug("%s shows %s", node, bad)
            return False
        if vouch.node != end:
            return False
        end = vouch.partner
    return end == node and bool(chain)
