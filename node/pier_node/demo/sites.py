"""The demo's sites: daemons of their own, started as a person would start them, and stopped whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sysconfig
from pathlib import Path

import psutil

from pier_node.identity import Token
from pier_node.inner.parent import die_with_parent
from pier_node.site import DAEMON_FILE
from pier_node.wire.transport import Transport

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
ANY_PORT = "127.0.0.1:0"
PATIENCE = 15.0
"""Seconds that a site gets to leave politely."""
HURRY = 3.0
"""Seconds that it gets to end when it was told twice."""
TAIL_LINES = 15


class Site:
    """One `pier-node start`; its folder and its log lie side by side.

    Args:
        work: the demo's folder.
        threads: for each of its processes.
    """

    def __init__(self, work: Path, name: str, threads: int, transport: Transport = "grpc") -> None:
        self.name = name
        self._transport = transport
        self.folder, self.log = work / name, work / f"{name}.log"
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._process is not None

    @property
    def running(self) -> bool:
        """Whether its daemon lives."""
        return self._process is not None and self._process.returncode is None

    @property
    def code(self) -> int | None:
        """The exit code of its daemon, once it has ended."""
        return self._process.returncode if self._process else None

    async def start(self, *way: str) -> None:
        """Found a run (`--run FILE`) or join one (`--peers … --token …`)."""
        program = Path(sysconfig.get_path("scripts")) / "pier-node"
        options = ["--data", str(self.folder), "--name", self.name, "--listen", ANY_PORT, "--workers", "1"]
        options += ["--transport", self._transport]
        plain = {"COLUMNS": "160", "NO_COLOR": "1", "OMP_NUM_THREADS": str(self._threads)}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                program,
                "start",
                *way,
                *options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plain},
                start_new_session=True,  # Ctrl+C is the demo's to decide about
                preexec_fn=die_with_parent,
            )

    def http(self) -> str | None:
        """Where it answers on this machine; None: not yet."""
        try:
            known = json.loads((self.folder / DAEMON_FILE).read_text())
        except FileNotFoundError:
            return None
        return str(known["http"]) if self._process and known["pid"] == self._process.pid else None

    def token(self) -> Token | None:
        """What it would tell somebody who wants to join."""
        return Token.load(self.folder)

    def terminate(self) -> None:
        """Ask it to leave; the second time, to end at once."""
        if self._process and self.running:
            self._process.terminate()

    def kill(self) -> None:
        """End it; its workers end with it."""
        if self._process and self.running:
            self._process.kill()

    async def ended(self) -> None:
        """Return when its daemon has ended."""
        if self._process:
            await self._process.wait()

    def family(self) -> list[psutil.Process]:
        """What its daemon has started: the workers."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True) if self._process and self.running else []
        except psutil.NoSuchProcess:
            return []

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(line.rstrip() for line in lines[-TAIL_LINES:])


class Sites:
    """All sites of the demo; the first one founds the run."""

    def __init__(self, work: Path, count: int, threads: int, transport: Transport = "grpc") -> None:
        self.all = [Site(work, name, threads, transport) for name in NAMES[:count]]

    async def found(self, run: Path) -> None:
        """Start the first site."""
        await self.all[0].start("--run", str(run))

    async def join(self, address: str) -> None:
        """Start the others, with what the first one has told."""
        token = self.all[0].token()
        for site in self.all[1:]:
            await site.start("--peers", address, "--token", str(token))

    async def ended(self, patience: float) -> None:
        """Return when all sites have ended, or after `patience` seconds."""
        running = [asyncio.create_task(site.ended()) for site in self.all if site.running]
        if running:
            await asyncio.wait(running, timeout=patience)

    async def stop(self) -> None:
        """End all sites and whatever they have started, within seconds; again: nothing."""
        family = [relative for site in self.all for relative in site.family()]
        for act, patience in ((Site.terminate, PATIENCE), (Site.terminate, HURRY), (Site.kill, HURRY)):
            for site in self.all:
                act(site)
            await self.ended(patience)
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, HURRY)
        for relative in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                relative.kill()
