"""Nodes that their own double votes convict: kept on the disk, put out at once, and told to all.

The proof is as good from anybody as from the site that found it (outer/double_votes.py), so no authority is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from pier.v1.peer_pb2 import DoubleVote
from pier_node import durable
from pier_node.outer.double_votes import read_double_vote
from pier_node.outer.statements import Statements
from pier_node.proofs import Proofs
from pier_node.wire.bounds import DOUBLE_VOTES, parse
from pier_node.wire.carrier import BadMessage

VOTED_TWICE = "voted for two results of one round, as only a site does that lies or has lost its journal"
CONVICTED_FILE = "double-votes.json"

log = logging.getLogger(__name__)


class Convicted:
    """Those that this site knows of.

    Args:
        proofs: only members of the run's rounds count, of whom a newcomer knows nothing yet: who never was one may
            prove anything against itself.
        bar: has nothing to do with these nodes from now on.
    """

    def __init__(
        self, folder: Path, statements: Statements, proofs: Proofs, bar: Callable[[Iterable[str], str], None]
    ) -> None:
        self._path, self._statements, self._proofs, self._bar = folder / CONVICTED_FILE, statements, proofs, bar
        self._found: dict[str, DoubleVote] = {}

    @property
    def proven(self) -> list[DoubleVote]:
        """The double votes, for others."""
        return list(self._found.values())

    def restore(self) -> None:
        """Put out those that are noted on the disk. Raises PierError: this user may not read it."""
        if not self._path.exists():
            return
        try:
            noted = durable.read_sealed(self._path)["double_votes"]
            for proof in [parse(DoubleVote, bytes.fromhex(it)) for it in noted]:
                self._put_out(read_double_vote(proof, self._statements), proof)
        except (durable.Torn, KeyError, ValueError, BadMessage) as torn:
            log.warning("%s is damaged; the peers will tell who voted twice: %s", self._path, torn)

    def take(self, proofs: Iterable[DoubleVote]) -> None:
        """Put out and note those that somebody proves to have voted twice. Raises BadMessage: it proves nothing."""
        for proof in proofs:
            known = proof.one.node in self._found or len(self._found) >= DOUBLE_VOTES
            if known or not (self._proofs.newest < 0 or self._proofs.has_member(proof.one.node)):
                continue
            node = read_double_vote(proof, self._statements)
            self._put_out(node, proof)
            self._note()

    def _put_out(self, node: str, proof: DoubleVote) -> None:
        self._found[node] = proof
        self._statements.convicted.add(node)
        self._bar([node], VOTED_TWICE)

    def _note(self) -> None:
        noted = [it.SerializeToString().hex() for it in self.proven]
        try:
            durable.replace(self._path, durable.seal({"double_votes": noted}))
        except OSError as error:
            log.error("%s: %s: a restart may forget who voted twice", self._path, error.strerror)
