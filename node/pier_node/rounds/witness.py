"""The witness: a node with a vote and no state, so that half of a run's members can go on when the others are silent.

In each round it gives its vote to the first site that asks for it: one signed Handover, which is on its disk before it
leaves. A leader asks when the group that it would propose lacks only this vote. The witness takes no part in attempts;
whoever holds its vote is bound by commitments of its own, like the holder of any vote that was handed over (quorum.py).
So two groups that carry the vote of the witness share a member.

A holder of votes gets it only for the newest state of which the witness has a proof (proofs.py), so nobody can use up
the votes of rounds to come, and a member that was left behind gets none.

The coordinator is the witness of its run if `run.witness` is set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from pier_node.base import durable
from pier_node.rounds.double_votes import read_double_vote
from pier_node.rounds.proofs import Trust, Trusted
from pier_node.rounds.quorum import carried
from pier_node.rounds.statements import Statements
from pier_node.wire.carrier import PeerLost
from pier_proto.v1.peer_pb2 import Handover, Link, Signed, WitnessReply, WitnessRequest

WITNESS_FILE = "witness.json"
PROOF = 192 << 10
"""Bytes of links in one request, unless a single one is longer."""

log = logging.getLogger(__name__)


def handover_of(witness: str, heir: str, state: Trusted) -> Handover:
    """The vote of the witness for the round after this state."""
    return Handover(node=witness, heir=heir, round=state.round, base=state.digest, votes=[witness], number=1)


class Witness:
    """The witness of one run.

    Args:
        path: the file that remembers to whom it gave its last vote, and after which state.
        asked: whether it was asked before; then the file must be there.
    """

    def __init__(self, path: Path, node: str, statements: Statements, asked: bool = False) -> None:
        self._path, self._node, self._statements = path, node, statements
        self._lock = threading.Lock()
        self._trusted: Trusted | None = None
        self._heir, self._damage = "", ""
        if path.exists() or asked:
            self._restore()

    def answer(self, sender: str, request: WitnessRequest, founder: str) -> WitnessReply:
        """Give the vote to a member that may have it, or say why not. Blocks.

        Args:
            founder: node id of the run's founder, with whom all proofs begin.

        Raises:
            BadMessage: the proof proves nothing.
            PierError: the handover cannot be written down, so it is none.
        """
        with self._lock:
            if self._damage:
                return WitnessReply(reason=self._damage)
            if self._trusted is None:
                first = Trusted(-1, b"", (founder,))
                self._keep(first, "")
                self._trusted = first
            before, convicted = self._trusted, self._statements.convicted
            for node in convicted.keys() - {*before.members}:  # anybody can make up nodes that vote twice
                del convicted[node]
            for proof in request.double_votes:
                convicted[read_double_vote(proof, self._statements)] = proof
            trust = Trust(before, self._statements)
            trust.learn([link for link in request.proof if link.round > before.round])
            now = trust.state
            reply = WitnessReply(trusted=now.round + 1)
            heir = self._heir if now.round == before.round else ""
            if request.base == now.digest:
                if not self._may_vote(sender, request, now):
                    reply.reason = f"{sender} has no vote after round {now.round}"
                elif heir not in ("", sender):
                    reply.reason = f"{heir} has its vote for round {now.round + 1}"
                else:
                    if not heir:
                        self._keep(now, sender)
                    heir = sender
                    reply.handover.CopyFrom(self._statements.seal(handover_of(self._node, sender, now)))
            self._trusted, self._heir = now, heir
            return reply

    def _may_vote(self, sender: str, request: WitnessRequest, state: Trusted) -> bool:
        """Whether a site has a vote of a member of that state: its own, or one that was handed to it."""
        told = (self._statements.read(Handover, signed) for signed in request.handovers)
        votes = carried([sender], [it for it in told if (it.round, it.base) == (state.round, state.digest)])
        return sender not in self._statements.convicted and not votes.isdisjoint(state.members)

    def _keep(self, state: Trusted, heir: str) -> None:
        fields = {"round": state.round, "digest": state.digest.hex(), "members": [*state.members], "heir": heir}
        try:
            durable.replace(self._path, durable.seal(fields))
        except OSError as error:
            raise durable.unwritable(f"cannot write down the vote of the witness in {self._path}", error) from error
        if heir:
            log.info("the witness gives %s its vote for round %d", heir, state.round + 1)

    def _restore(self) -> None:
        try:
            kept = durable.read_sealed(self._path)
            self._trusted = Trusted(kept["round"], bytes.fromhex(kept["digest"]), tuple(kept["members"]))
            self._heir = kept["heir"]
        except (durable.Torn, KeyError, ValueError) as torn:
            self._damage = f"{torn}: it cannot know whether it gave its vote"
            log.error("the run has no witness, so half of its sites cannot go on without the others: %s", self._damage)


Ask = Callable[[WitnessRequest], Awaitable[WitnessReply]]
"""Asks the witness. Raises PeerLost."""


async def vote_of_witness(ask: Ask, request: WitnessRequest, round: int, prove: Callable[[int], list[Link]]) -> Signed:
    """The vote of the run's witness for the round after a state. Raises PeerLost: it does not give it.

    Args:
        request: names that state, of `round`, and has no proof yet.
        prove: returns the links that prove it to somebody who trusts the state of that round, or a first part of them.
    """
    reply, trusted = await ask(request), -2
    while not reply.HasField("handover"):
        if reply.reason:
            raise PeerLost("the witness", reply.reason)
        now = reply.trusted - 1
        if now >= round:
            raise PeerLost("the witness", f"it knows of round {now}, and this site is at round {round}")
        links = _page(prove(now))
        if now <= trusted or not links:
            raise PeerLost("the witness", f"this site cannot prove what was committed after round {now}")
        trusted = now
        del request.proof[:]
        request.proof.extend(links)
        reply = await ask(request)
    return reply.handover


def _page(links: Iterable[Link]) -> list[Link]:
    size, page = 0, list[Link]()
    for link in links:
        size += link.ByteSize()
        if page and size > PROOF:
            break
        page.append(link)
    return page
