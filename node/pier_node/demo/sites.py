"""A demo and its programs: sites and their coordinator, separate daemons, started as a user would start them.

All demos have a folder of their own, sites that are started, watched and ended, and a result. The folder is marked, so
that no other folder is ever emptied, and locked for one demo at a time. However a demo ends, no process is left.

Other Pier commands are run here, too, and their output collected. A site can be slowed down: its workers are stopped
for a part of each period (SIGSTOP, SIGCONT), because sites on one machine are equally fast otherwise. The site does not
know this, so its measurements are true.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil
from rich.console import Console, RenderableType

from pier_node.base.errors import PierError
from pier_node.base.tasks import when_stopped
from pier_node.config.run import RunConfig, load
from pier_node.identity.node import write_private
from pier_node.rounds.folder import DAEMON_FILE
from pier_node.wire.transport import Transport

SCRIPTS = Path(sysconfig.get_path("scripts"))
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
ANY_PORT = "127.0.0.1:0"
TAIL_LINES = 15
PATIENCE = 15.0
"""Seconds that a site gets to leave politely."""
HURRY = 3.0
"""Seconds that it gets to end after the second request."""
STARTING = 60.0
"""Seconds that the coordinator gets until it answers."""
LOOK = 0.05


async def output(program: str, *words: str) -> str:
    """Run a command and return its output. Raises PierError: it fails."""
    async with started(program, *words) as process:
        printed, errors = await process.communicate()
    if process.returncode:
        raise PierError(f"{program} {words[0]}: {errors.decode(errors='replace').strip()}")
    return printed.decode()


@asynccontextmanager
async def started(program: str, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process with its output in pipes; if it still runs after the block, it is asked to end."""
    process = await asyncio.create_subprocess_exec(
        SCRIPTS / program,
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "150"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_for(sites: int) -> int:
    """Threads for each of `sites` sites, so that together they use each core once."""
    return max(cores() // sites, 1)


class Program:
    """One of Pier's daemons, with its folder and its log next to each other in the demo's folder `work`.

    Args:
        threads: number of threads for each of its processes.
    """

    def __init__(self, work: Path, name: str, threads: int = 1) -> None:
        self.name = name
        self.folder, self.log = work / name, work / f"{name}.log"
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.returncode is None

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.returncode if self._process else None

    async def run(self, program: str, *words: str) -> None:
        """Start it."""
        plain = {"COLUMNS": "160", "NO_COLOR": "1", "OMP_NUM_THREADS": str(self._threads)}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pier_node.base.processes"),  # a fork here would disturb the threads of gRPC
                *(str(SCRIPTS / program), *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **plain},
                start_new_session=True,  # the demo decides about Ctrl+C
            )

    def told(self) -> dict[str, Any]:
        """The content of its daemon.json; {}: nothing yet."""
        try:
            known = json.loads((self.folder / DAEMON_FILE).read_text())
        except FileNotFoundError:
            return {}
        return dict(known) if self._process and known["pid"] == self._process.pid else {}

    def http(self) -> str | None:
        """Its HTTP address on this machine; None: not yet."""
        return self.told().get("http")

    def terminate(self) -> None:
        """Ask it to leave; the second time, to end at once."""
        if self._process and self.running:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it; the processes that it started end with it."""
        if self._process and self.running:
            self._process.kill()

    async def ended(self) -> None:
        """Return when it has ended."""
        if self._process:
            await self._process.wait()

    def family(self) -> list[psutil.Process]:
        """The processes that it started."""
        try:
            return psutil.Process(self._process.pid).children(recursive=True) if self._process and self.running else []
        except psutil.NoSuchProcess:
            return []

    @property
    def obituary(self) -> str:
        """A message that it has ended, and how."""
        return f"site {self.name} ended with exit code {self.code}; {self.log} ends with:\n{self.tail()}"

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(line.rstrip() for line in lines[-TAIL_LINES:])


class Coordinator(Program):
    """One `pier-coordinator start`."""

    async def start(self, run: Path) -> None:
        """Start it for a run, and wait until it answers. Raises PierError: it does not."""
        self.folder.mkdir(exist_ok=True)
        shutil.copy(run, self.folder / "run.toml")
        await self.run("pier-coordinator", "start", str(self.folder), "--listen", ANY_PORT, "--page", ANY_PORT)
        deadline = asyncio.get_running_loop().time() + STARTING
        while self.running and not self.told():
            if asyncio.get_running_loop().time() > deadline:
                self.kill()
            await asyncio.sleep(LOOK)
        if not self.running:
            raise PierError(f"the coordinator does not run; {self.log} ends with:\n{self.tail()}")

    async def invite(self, uses: int) -> Path:
        """A file with a token for that many sites. Raises PierError."""
        told = await output("pier-coordinator", "invite", "--data", str(self.folder), "--uses", str(uses), "--json")
        file = self.folder / "invite.token"
        write_private(file, str(json.loads(told)["token"]).encode())
        return file


class Site(Program):
    """One `pier-node start`."""

    async def start(self, *way: str) -> None:
        """Join a run: see `Sites.invited`."""
        options = ["--data", str(self.folder), "--name", self.name, "--listen", ANY_PORT, "--workers", "1"]
        await self.run("pier-node", "start", *way, *options)


class Sites:
    """All sites of the demo and their coordinator; together the sites use each core once."""

    def __init__(self, work: Path, count: int, transport: Transport = "grpc") -> None:
        threads, self._transport = threads_for(count), transport
        self.all = [Site(work, name, threads) for name in NAMES[:count]]
        self.coordinator = Coordinator(work, "coordinator", threads)

    async def start(self, run: Path) -> str:
        """Start the coordinator, then all sites. Returns the address of its page. Raises PierError."""
        way = await self.invited(run)
        for site in self.all:
            await site.start(*way)
        return str(self.coordinator.http())

    async def invited(self, run: Path) -> list[str]:
        """Start only the coordinator. Returns the options with which sites join. Raises PierError."""
        await self.coordinator.start(run)
        address, file = str(self.coordinator.told()["address"]), await self.coordinator.invite(len(self.all))
        return ["--coordinator", address, "--token-file", str(file), "--transport", self._transport]

    async def ended(self, patience: float) -> None:
        """Return when all sites have ended, or after `patience` seconds."""
        await _ended(self.all, patience)

    async def stop(self) -> None:
        """End all sites, the coordinator and all processes that they started, within seconds; repeatable."""
        family = [relative for program in (*self.all, self.coordinator) for relative in program.family()]
        for act, patience in ((Program.terminate, PATIENCE), (Program.terminate, HURRY), (Program.kill, HURRY)):
            for site in self.all:
                act(site)
            await self.ended(patience)
        for act in (Program.terminate, Program.kill):
            act(self.coordinator)
            await _ended([self.coordinator], HURRY)
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, HURRY)
        _send(alive, signal.SIGKILL)


async def _ended(programs: Sequence[Program], patience: float) -> None:
    running = [asyncio.create_task(program.ended()) for program in programs if program.running]
    if running:
        await asyncio.wait(running, timeout=patience)


PERIOD = 0.2
"""Seconds of a period in which a worker runs and is stopped once."""
WORKER = "pier-worker"
"""As named in trainer/worker.py, which is not imported here because it imports torch."""


async def throttle(program: Program, share: float) -> None:
    """Let the workers of a program run for `share` of the time until cancelled; then they run normally."""
    stopped: list[psutil.Process] = []
    try:
        while True:
            workers = await asyncio.to_thread(_workers, program)
            stopped = workers
            _send(workers, signal.SIGSTOP)
            await asyncio.sleep(PERIOD * (1 - share))
            _send(workers, signal.SIGCONT)
            await asyncio.sleep(PERIOD * share)
    finally:
        _send(stopped, signal.SIGCONT)


def _workers(program: Program) -> list[psutil.Process]:
    found = []
    for process in program.family():
        with suppress(psutil.NoSuchProcess):
            if process.name() == WORKER:
                found.append(process)
    return found


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


MARK = ".pier-demo"
ELSEWHERE = "Choose another folder with --folder."
RUN_FILE, RESULT_FILE, MODEL_FOLDER = "run.toml", "result.json", "model"
TICK = 0.25
"""Seconds between two looks at the sites."""
STILL = 240.0
"""Seconds without news after which a demo gives up. A pipeline's first step waits until the planner is compiled."""
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
            KeyboardInterrupt: it was stopped first.
        """
        result = asyncio.run(self._interruptible(script))
        if result is None:
            raise KeyboardInterrupt
        return result

    async def _interruptible(self, script: Coroutine[Any, Any, T]) -> T | None:
        task, ending = asyncio.create_task(script), asyncio.Event()
        when_stopped(ending.set)
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
