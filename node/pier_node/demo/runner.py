"""What all demos have in common: a folder of their own, sites that are started, watched and ended, and a result.

The folder is marked, so that no other folder is ever emptied, and locked for one demo at a time. However a demo ends,
no process is left.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.console import Console, RenderableType

from pier_node.base.errors import PierError
from pier_node.config.run import RunConfig, load
from pier_node.demo.sites import Site, Sites
from pier_node.wire.transport import Transport

MARK = ".pier-demo"
ELSEWHERE = "Choose another folder with --folder."
RUN_FILE, RESULT_FILE, MODEL_FOLDER = "run.toml", "result.json", "model"
TICK = 0.25
"""Seconds between two looks at the sites."""
STILL = 240.0
"""Seconds without news after which a demo gives up. A pipeline's first step waits until the planner is compiled."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


@contextmanager
def claimed(folder: Path, keep: bool = False) -> Iterator[Path]:
    """Lock a demo's folder for this process; it is empty, or with `keep` as the last demo left it.

    Raises:
        PierError: it is not a demo's folder, another demo uses it, or it cannot be written.
    """
    try:
        mark = _claim(folder)
    except OSError as error:
        raise PierError(f"{folder}: a demo cannot work there: {error.strerror}", ELSEWHERE) from error
    with mark:
        if not keep:
            _empty(folder)
        yield folder.resolve()


def _claim(folder: Path) -> IO[str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / MARK).exists() and any(folder.iterdir()):
        raise PierError(f"{folder} holds something else than a demo, and a demo begins by emptying it", ELSEWHERE)
    mark = (folder / MARK).open("w")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        mark.close()
        raise PierError(f"another demo is at work in {folder}", ELSEWHERE) from error
    return mark


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()


class Demo:
    """A demo in its folder, which holds the run.toml of its sites.

    Args:
        work: a claimed folder.
        as_json: print the result as JSON to stdout and everything else to stderr.
    """

    def __init__(self, work: Path, as_json: bool, transport: Transport = "grpc") -> None:
        self.work = work
        self.config: RunConfig = load(work / RUN_FILE)
        self.sites = Sites(work, self.config.run.sites, transport)
        self.console = Console(stderr=as_json)
        self._as_json = as_json
        self._began = 0.0

    def perform(self, script: Coroutine[Any, Any, T]) -> T:
        """Run a script that starts the sites; all have ended when this returns.

        Raises:
            KeyboardInterrupt: one of SIGNALS came first.
        """
        result = asyncio.run(self._interruptible(script))
        if result is None:
            raise KeyboardInterrupt
        return result

    async def _interruptible(self, script: Coroutine[Any, Any, T]) -> T | None:
        task, ending = asyncio.create_task(script), asyncio.Event()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, ending.set)
        end = asyncio.create_task(ending.wait())
        await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        task.cancel()
        await asyncio.wait([task])
        await self.sites.stop()
        return None if task.cancelled() else task.result()

    async def start(self) -> str:
        """Start the coordinator and all sites. Returns the address of the run's page. Raises PierError."""
        self._began = asyncio.get_running_loop().time()
        return await self.sites.start(self.work / RUN_FILE)

    async def ticks(self, news: Callable[[], object]) -> AsyncIterator[float]:
        """Every TICK seconds, the seconds since the start.

        Raises:
            PierError: `news` has returned the same for STILL seconds.
        """
        clock = asyncio.get_running_loop().time
        last, heard = news(), clock()
        while True:
            await asyncio.sleep(TICK)
            yield clock() - self._began
            if (now := news()) != last:
                last, heard = now, clock()
            if clock() - heard > STILL:
                states = "\n".join(map(_state, self.sites.all))
                raise PierError(f"nothing has happened for {STILL:.0f} seconds\n{states}", "Mend what the logs show.")

    def finish(self, result: dict[str, Any], report: RenderableType = "") -> None:
        """Write the result to RESULT_FILE, and print it as JSON or, if there is one, a report for people."""
        (self.work / RESULT_FILE).write_text(json.dumps(result, indent=1) + "\n")
        if self._as_json:
            print(json.dumps(result))
        elif report:
            self.console.print(report)


def _state(site: Site) -> str:
    return (
        f"{site.name}: {'running' if site.running else f'exit code {site.code}'}; {site.log} ends with:\n{site.tail()}"
    )
