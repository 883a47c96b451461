"""The proofs that this site can give: the chain of links (outer/certificate.py) of its run, in one file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pier.v1.peer_pb2 import Link
from pier_node import durable
from pier_node.errors import PierError
from pier_node.outer.certificate import Chain

PROOFS_FILE = "proofs.json"
PAGE = 1 << 20
"""Most bytes of links in one answer: who needs more asks again."""

log = logging.getLogger(__name__)


class Proofs:
    """The links that a site knows; they are on the disk before it says that it holds the state that they prove."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chain = Chain()
        if path.exists():
            try:
                self._chain = Chain(Link.FromString(bytes.fromhex(it)) for it in durable.read_sealed(path)["links"])
            except durable.Torn as torn:
                log.warning("%s: this site cannot prove to newcomers what was committed before its next round", torn)

    def add(self, links: Sequence[Link]) -> None:
        """Return once they would survive a power cut. Blocks. Raises PierError."""
        chain = self._chain
        for link in links:
            chain = chain.with_link(link)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(self._path, durable.seal({"links": [it.SerializeToString().hex() for it in chain.links]}))
        except OSError as error:
            problem = f"{self._path}: cannot write down the proof of a round: {error.strerror}"
            raise PierError(problem, "Free some space there and start again.") from error
        self._chain = chain

    def after(self, round: int) -> list[Link]:
        """What somebody needs who trusts the state of that round: all of it, or a first part."""
        size, page = 0, list[Link]()
        for link in self._chain.after(round):
            size += link.ByteSize()
            if page and size > PAGE:
                break
            page.append(link)
        return page
