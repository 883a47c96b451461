"""A site's data folder: what the site knows of itself and others between starts, in `site.json` and `run.json`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

from pydantic import TypeAdapter

from pier_node.base import durable
from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, from_canonical
from pier_node.wire.tokenizer import with_copy
from pier_node.wire.transport import Transport
from pier_proto.v1.peer_pb2 import Site

RUN_FILE, SITE_FILE, LOCK_FILE = "run.json", "site.json", "lock"
DAEMON_FILE, EVENTS_FILE = "daemon.json", "events.jsonl"
"""Files of a running daemon: its pid and status page, and one line for each round that it committed."""
EARLIER_EVENTS_FILE = "events.1.jsonl"
"""The lines before those."""


def read_events(written: bytes) -> list[dict[str, Any]]:
    """Events that a site has written to events.jsonl so far; a line that is not whole is skipped."""
    events = []
    for line in written[: written.rfind(b"\n") + 1].splitlines():
        with suppress(ValueError):  # the machine failed while it was written
            events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]


Peer = tuple[str, str, str, int, int, str, str]


@dataclass(frozen=True)
class SiteRecord:
    """This site's own notes.

    Attributes:
        founder: whether this site began the run; it may begin it again if nobody ever joined.
        founded_by: node id of the site that began the run, if a trusted source told this one.
        slot: this site's part of the training data.
        version: version of the entry that this site signed last; see roster.py.
        peers: the others' entries: node id, name, address, slot, version, public key in hex, signature in hex.
        transport: how this site is connected to them.
        name: the site's name; it stays the same unless the site is told another.
        listen, advertise, dataset, shared_data: these stay likewise; see Settings.
        program: the --exec that trains here; empty: a program that starts the daemon; None: Pier's trainer.
    """

    founder: bool
    slot: int
    peers: tuple[Peer, ...] = ()
    transport: Transport = "grpc"
    name: str = ""
    listen: str = ""
    advertise: str = ""
    dataset: str = ""
    version: int = 0
    shared_data: bool = False
    founded_by: str = ""
    program: str | None = None

    def with_peers(self, sites: Iterable[Site]) -> Self:
        """The same record with other peers."""
        return replace(self, peers=tuple(map(_peer, sites)))

    def sites(self) -> list[Site]:
        """The peers as messages."""
        return [_site(peer) for peer in self.peers]

    def save(self, folder: Path) -> None:
        """Write site.json. Raises PierError."""
        try:
            durable.replace(folder / SITE_FILE, durable.seal(asdict(self)))
        except OSError as error:
            raise unwritable(folder, error) from error

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read site.json; None at the first start. Raises PierError."""
        if not (folder / SITE_FILE).exists():
            return None
        try:
            fields = durable.read_sealed(folder / SITE_FILE)
        except durable.Torn as torn:
            raise PierError(f"{folder}: {torn}", "Delete it and start with --peers and --token again.") from torn
        peers = [_peer(_site(peer)) for peer in fields["peers"]]
        return TypeAdapter(cls).validate_python({**fields, "peers": peers})


def _peer(site: Site) -> Peer:
    return site.node, site.name, site.address, site.slot, site.version, site.public.hex(), site.signature.hex()


def _site(peer: Sequence[Any]) -> Site:
    node, name, address, slot, version, public, signature = (*peer, 0, "", "") if len(peer) == 4 else peer
    proof = bytes.fromhex(public), bytes.fromhex(signature)
    return Site(node=node, name=name, address=address, slot=slot, version=version, public=proof[0], signature=proof[1])


def claim(folder: Path) -> IO[bytes]:
    """Create a data folder if necessary, and keep other daemons out of it while the returned file is open.

    Raises:
        PierError: another daemon runs there, or the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("ab")
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise PierError(
            f"another pier-node runs in {folder}",
            f"Stop it with `pier-node stop --data {folder}`, or give this one another --data folder and --listen port.",
        ) from error
    return file


def require_claimed(folder: Path, lock: IO[bytes]) -> None:
    """Check that a folder is still the one that `claim` locked. Raises PierError."""
    try:
        gone = not (folder / LOCK_FILE).exists() or os.fstat(lock.fileno()).st_nlink == 0
    except OSError:  # a network file system that does not answer now
        return
    if gone:
        raise PierError(
            f"{folder}, or the file {LOCK_FILE} in it, was deleted or moved while this site ran",
            "Put all of it back and start again. If it is lost, start with an empty --data folder, as a new site: this "
            "one's key and votes were there.",
        )


def unwritable(folder: Path, error: OSError) -> PierError:
    """The error for a data folder that cannot be written."""
    if error.errno in durable.FULL:
        return durable.unwritable(str(error.filename or folder), error)
    return PierError(
        f"{error.filename or folder}: {error.strerror}",
        "Name a --data folder that this user can write, on a file system that is not read-only.",
    )


def require_folder(folder: Path) -> None:
    """Check that a data folder exists, for commands that only read. Raises PierError."""
    if not folder.is_dir():
        raise PierError(f"{folder}: no such folder", "Name the --data folder of a site; `pier-node start` makes one.")


def load_run(folder: Path) -> RunConfig | None:
    """Configuration of the run that this folder belongs to; None if it belongs to no run yet. Raises PierError."""
    path = folder / RUN_FILE
    if not path.exists():
        return None
    try:
        config = from_canonical(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except PierError as error:
        raise PierError(error.problem, f"Copy {RUN_FILE} from the --data folder of another site of the run.") from error
    return with_copy(config, folder)


def save_run(folder: Path, config: RunConfig) -> None:
    """Assign the folder to a run."""
    durable.replace(folder / RUN_FILE, config.canonical().encode())
