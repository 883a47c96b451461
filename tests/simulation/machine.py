"""A site's computer in virtual time: its disk stays, processes of the real daemon come and go.

Only what touches a network, a model or a screen is a double (doubles.py). All the rest, from the class
`pier_node.site.daemon.Daemon` to the last file that it writes, is what a user runs.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.disk import Disk, PowerCut
from simulation.doubles import HuntDaemon, HuntSettings
from simulation.process import HERE, Process

from pier_node.outer.state import OuterState
from pier_node.rounds.state_store import StateStore
from pier_node.site.settings import Settings

if TYPE_CHECKING:
    from simulation.world import World


class Machine:
    """One of them.

    Args:
        peers: whom its site is told of at its first start; none: it founds the run.

    Attributes:
        folder: of its site's data; it has another name after each process, so that a dead one cannot write into it.
        now: the last process.
        damaged: whether its disk has lost what it had saved.
    """

    def __init__(self, world: World, site: str, root: Path, peers: tuple[str, ...]) -> None:
        self.world, self.site, self._root, self._peers = world, site, root, peers
        self.folder = root / f"{site}.0"
        self.now: Process | None = None
        self.full: str = ""
        self.paused = self.damaged = False
        self.starts = 0

    @property
    def up(self) -> bool:
        """Whether a process runs."""
        return self.now is not None and not self.now.dead

    def boot(self) -> None:
        """Start the daemon, unless it runs."""
        if self.up:
            return
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        here = self.now = Process(self.world, self.site, self.starts, Disk(self.folder, self.full))
        here.disk.on_cut = lambda: Context().run(self._cut, here)
        if self.paused:
            here.orders.take(1, True)
        settings = HuntSettings(self.folder, peers=self._peers, name=self.site, strike=self._strike(here))
        context = copy_context()
        context.run(HERE.set, here)
        self.world.note(self.site, f"starts, for the {here.number}. time")
        asyncio.get_running_loop().create_task(self._live(here, settings), context=context)

    async def _live(self, here: Process, settings: Settings) -> None:
        here.daemon = HuntDaemon(here, settings)
        try:
            await here.daemon.run()
        except (Exception, asyncio.CancelledError) as error:
            here.error = error
        if not here.dead:
            await asyncio.sleep(self.world.latency)  # a process ends when its threads have
            Context().run(self._ended, here)

    def _ended(self, here: Process) -> None:
        here.end()
        self._move()
        self.world.ended(here)

    def _strike(self, here: Process) -> Callable[[int, str], Awaitable[None]]:
        async def strike(round: int, phase: str) -> None:
            if not here.dead and self.world.reached(self.site, round, phase):
                Context().run(self.kill, f"killed when it is {phase} in round {round}")
                raise PowerCut

        return strike

    def kill(self, why: str) -> None:
        """The power goes."""
        if self.up and self.now:
            self.world.note(self.site, why)
            self.now.end()
            self._move()

    def _cut(self, here: Process) -> None:
        """The power goes in the middle of a write."""
        self.world.note(self.site, f"killed at a write: {here.disk.told}")
        here.end()
        self._move()
        self.world.cut(self.site)

    def _move(self) -> None:
        folder = self._root / f"{self.site}.{self.starts}"
        self.folder.rename(folder)
        self.folder = folder

    def fill(self, how: str) -> None:
        """The disk takes nothing more; "" frees it."""
        self.full = how
        if self.up and self.now:
            self.now.disk.full = how
            self.now.disk.was_full |= bool(how)

    def stop(self) -> None:
        """`pier-node stop`."""
        if self.up and self.now and self.now.daemon and not self.now.stopping:
            self.world.note(self.site, "is told to stop")
            self.now.stopping = True
            self.now.daemon.stop()

    def order(self, paused: bool) -> None:
        """The coordinator's order."""
        self.paused = paused
        if self.up and self.now:
            self.now.orders.take(self.now.orders.epoch + 1, paused)

    def states(self) -> list[OuterState]:
        """What it would go on from: in memory while it runs, and on its disk."""
        folder, run = self.folder, self.world.config.hash()
        live = self.now.rounds.state if self.up and self.now and self.now.rounds else None
        saved = StateStore(folder / "checkpoints", run).newest_state()
        kept = StateStore(folder / "states", run).after(-1)
        return [state for state in (live, saved, kept) if state is not None]

    def damage(self, how: str) -> None:
        """The newest checkpoint is lost or spoilt while the site is down; it needs another one to go back to."""
        found = sorted((self.folder / "checkpoints").glob("round-" + "[0-9]" * 8))
        if self.up or len(found) < 2:
            return
        self.world.note(self.site, f"{found[-1].name} is {how}")
        self.damaged = True
        if how == "deleted":
            shutil.rmtree(found[-1])
        else:
            files = sorted(found[-1].iterdir())
            spoilt = files[self.world.random.randrange(len(files))]
            spoilt.write_bytes(spoilt.read_bytes()[: spoilt.stat().st_size // 2])
