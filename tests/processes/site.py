"""A real site under test: `pier-node start` in a process of its own, watched from outside as a user would."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

import psutil
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_private_key
from processes.place import HERE, Place
from processes.program import Program

from pier_node.base.address import parse_address
from pier_node.identity.node import Identity
from pier_node.rounds.folder import EVENTS_FILE, read_events
from pier_node.wire.addresses import Route
from pier_node.wire.libp2p.p2pd import KEY_FILE, make_key
from pier_node.wire.transport import Transport

PROGRAM = HERE.command("pier-node")[0]
PATIENCE = 300.0
"""Seconds within which whatever is waited for happens, on a busy machine of two cores."""
LEAVING = 60.0
"""Seconds within which a program ends that is asked to, on such a machine."""
LOOK = 0.02
TEMPORARY = Path("/tmp")
"""Where a daemon keeps the socket of its workers."""
TAIL = 60

Status = dict[str, Any]


def wait_until(what: str, seen: Callable[[], bool], within: float = PATIENCE) -> None:
    """Look again and again until `seen()`. Raises AssertionError when it does not come."""
    deadline = time.monotonic() + within
    while not seen():
        assert time.monotonic() < deadline, f"not within {within:.0f} s: {what}"
        time.sleep(LOOK)


def peer_id(key: Path) -> str:
    """The libp2p peer id of a key file, as https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md says."""
    import base58
    from hivemind.proto.crypto_pb2 import KeyType, PrivateKey, PublicKey

    private = load_der_private_key(PrivateKey.FromString(key.read_bytes()).data, password=None)
    public = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(PublicKey(key_type=KeyType.ECDSA, data=public).SerializeToString()).digest()
    return str(base58.b58encode(b"\x12\x20" + digest).decode())


class Site(Program):
    """A site: its folder, its command, and the process that runs it when it does.

    Args:
        folder: its data folder; the identity in it is made here if there is none.
        options: of `pier-node start`, besides its folder, name, address and transport.
        place: where it runs.

    Attributes:
        address: that others are told.
        command: what `start` runs, in the folder above its data folder.
    """

    def __init__(self, folder: Path, *options: str, transport: Transport = "grpc", place: Place = HERE) -> None:
        super().__init__(folder, place)
        self.name = folder.name
        self.address = listen = f"{place.address}:{place.port(7700)}"
        self.node = Identity.load_or_create(folder).node
        own = ["--data", str(folder), "--name", folder.name, "--listen", listen]
        if transport == "hivemind":
            own += ["--transport", "hivemind"]
            self.address = str(Route(*parse_address(listen), peer_id(make_key(folder / KEY_FILE))))
        self.command = place.command("pier-node", "start", *own, *options)

    def __repr__(self) -> str:
        return f"{self.name} ({self.node})"

    def start(self, *more: str) -> None:
        """Run its command."""
        with self.log.open("a") as log:
            log.write(f"--- start {' '.join(more)}\n")
        self.launch([*self.command, *more])

    # --- what it says --------------------------------------------------------------------------

    def status(self) -> Status:
        """Its status over HTTP; {} while it does not answer."""
        try:
            daemon = json.loads((self.folder / "daemon.json").read_text())
            return dict(json.loads(self.place.get(f"{daemon['http']}/status")))
        except (OSError, ValueError):
            return {}

    def events(self) -> list[Status]:
        """A status for each round that it committed, of all its starts."""
        path = self.folder / EVENTS_FILE
        events = read_events(path.read_bytes() if path.exists() else b"")
        return [event for event in events if event["round"]]

    @property
    def round(self) -> int:
        """The last round that it committed itself; 0 before the first."""
        events = self.events()
        return int(events[-1]["round"]) if events else 0

    def digests(self) -> dict[int, str]:
        """Digest by round, of the rounds that it committed."""
        return {event["round"]: event["digest"] for event in self.events()}

    # --- waiting for it ------------------------------------------------------------------------

    def wait(self, what: str, seen: Callable[[], bool], within: float = PATIENCE) -> None:
        """Wait for something that it does while it runs; it need not last."""
        came = ended = False

        def seen_or_ended() -> bool:
            nonlocal came, ended
            ended = not self.running  # first: what it did last counts
            came = seen()
            return came or ended

        wait_until(f"{self}: {what}", seen_or_ended, within)
        assert came, f"{self} ended with exit code {self.exit_code} before: {what}"

    def reach(self, round: int, within: float = PATIENCE) -> None:
        """Wait until it has committed a round."""
        self.wait(f"round {round}", lambda: self.round >= round, within)

    def rejoin(self, within: float = PATIENCE) -> None:
        """Wait until it, started again, commits a round with others."""
        before = len(self.events())
        self.wait("a round with others", lambda: any(len(it["members"]) > 1 for it in self.events()[before:]), within)

    def be(self, *phases: str, within: float = PATIENCE) -> None:
        """Wait until its status says one of these phases."""
        self.wait(f"is {' or '.join(phases)}", lambda: self.status().get("phase") in phases, within)

    def take_part(self) -> None:
        """Wait until it is up and trains."""
        self.be("training", "waiting", "exchanging")

    def ended(self, within: float = PATIENCE) -> int:
        """Wait until its process ends; returns the exit code, -N: signal N."""
        wait_until(f"{self} ends", lambda: not self.running, within)
        assert self.exit_code is not None
        return self.exit_code

    # --- what is done to it --------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        """The daemon's children and theirs."""
        with suppress(psutil.NoSuchProcess):
            return list(self.daemon.children(recursive=True)) if self.running else []
        return []

    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        return [child for child in self.family() if child.name() == "pier-worker"]

    def send(self, number: Signals) -> None:
        """Send its daemon a signal, if it runs."""
        if self.running:
            self.daemon.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the whole family at once."""
        for process in [*self.family(), *([self.daemon] if self.running else [])]:
            with suppress(psutil.NoSuchProcess):  # workers end when their daemon is gone
                process.kill()
        if self._process:
            self._process.wait()

    def hold(self) -> None:
        """Stop its workers where they are: it trains no further, and answers all the same."""
        for worker in self.workers():
            worker.suspend()

    def release(self) -> None:
        """Let its workers go on."""
        for worker in self.workers():
            worker.resume()

    def stop(self, number: Signals = SIGTERM) -> int:
        """Have it leave politely; returns the exit code."""
        self.send(number)
        return self.ended(LEAVING)

    def tail(self) -> str:
        """The end of what it and its workers printed."""
        workers = self.folder / "logs" / "workers.log"
        parts = [path for path in (self.log, workers) if path.exists()]
        return "\n".join(f"=== {path}\n" + "\n".join(path.read_text().splitlines()[-TAIL:]) for path in parts)
