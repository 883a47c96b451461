"""The sites of bench/goodput.py: real `pier-node start`, killed with all that they started, and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGKILL, Signals

import psutil

from bench.goodput_figures import Commit
from bench.ports import free_port
from pier_node.config.run import load
from pier_node.identity.node import Token
from pier_node.rounds.folder import EVENTS_FILE, read_events

HOOK = Path(__file__).with_name("goodput_hook")
PROGRAMS = Path(sysconfig.get_path("scripts"))
ENDLESS = 10_000_000
PACE = 0.05
"""Seconds of an inner step."""
INNER_STEPS = 20
"""A round a second."""
GONE_SECONDS = 10.0
"""The most that a killed process takes to be gone."""


class Site:
    """A site, and its data folder.

    Attributes:
        killed: when it was, seconds since the epoch.
        died: how often its daemon ended by itself.
    """

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._command, self.folder, self._environment = command, folder, environment
        self._process: subprocess.Popen[bytes] | None = None
        self.killed: list[float] = []
        self.died = 0

    def start(self) -> None:
        """Run its command."""
        with self.folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # the kernel's scheduler shares cores out to sessions: as those of services
            )

    def family(self) -> list[psutil.Process]:
        """Its launcher and its workers, and last its daemon; nothing if that has ended."""
        if self._process is None or self.ended:
            return []
        with suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(self._process.pid)
            return [*daemon.children(recursive=True), daemon]
        return []

    def kill(self) -> None:
        """SIGKILL to all of them at once; returns when they are gone."""
        family = self.family()
        self.send(SIGKILL)
        if self._process is not None:
            self._process.wait()
        psutil.wait_procs(family, GONE_SECONDS)

    def send(self, number: Signals) -> None:
        """Send all of them a signal."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def leave(self, within: float) -> int | None:
        """Ask the daemon to leave. Returns its exit code; None: it has not ended within so many seconds."""
        for process in self.family()[-1:]:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(within) if self._process else 0
        return None

    def supervise(self) -> None:
        """Start it again if it has ended by itself."""
        if self.ended:
            self.died += 1
            self.start()

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself, or by force."""
        return bool(self._process and self._process.poll() is not None)

    def commits(self) -> list[Commit]:
        """What it wrote down of each round that it committed, in all of its lives."""
        path = self.folder / EVENTS_FILE
        return [
            Commit(
                event["time"],
                event["round"],
                len(event["members"]),
                event["tokens_in_anchor"],
                event["validation_loss"],
            )
            for event in read_events(path.read_bytes() if path.exists() else b"")
        ]

    def tail(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.folder.with_suffix(".log").read_text(errors="replace").splitlines()[-20:])


def hooked(hook: Path, **variables: object) -> dict[str, str]:
    """The environment of sites whose processes import the sitecustomize.py in `hook`, with more variables for it."""
    paths = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
    plain = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "NO_COLOR": "1"}
    return {**os.environ, **plain, **{name: str(value) for name, value in variables.items()}}


def start_commands(run: Path, folders: Sequence[Path], addresses: Sequence[str]) -> list[list[str]]:
    """`pier-node start` for each folder, at its address; the first site founds the run, which the others join."""
    token, program = str(Token.new(load(run).hash())), str(PROGRAMS / "pier-node")
    ways = [["--run", str(run)], *(["--peers", addresses[0]] for _ in addresses[1:])]
    return [
        [program, "start", *way, "--token", token, "--data", str(folder), "--name", folder.name, "--listen", address]
        for way, folder, address in zip(ways, folders, addresses, strict=True)
    ]


def invited(
    coordinator: Site, run: str, folders: Sequence[Path], addresses: Sequence[str], within: Sequence[str] = ()
) -> list[list[str]]:
    """`pier-node start` for each folder, with an invite of the run's coordinator, which is started here.

    Args:
        within: words before a command that has it run where the coordinator does.
    """
    folder = coordinator.folder
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(run)
    coordinator.start()
    ways = [_invite(folder, each.name, within) for each in folders]
    return [[*way, "--data", str(each), "--listen", at] for way, each, at in zip(ways, folders, addresses)]


def _invite(folder: Path, name: str, within: Sequence[str]) -> list[str]:
    """The command of an invite, once the coordinator answers. Raises RuntimeError."""
    words = [*within, str(PROGRAMS / "pier-coordinator"), "invite", "--data", str(folder), "--name", name, "--json"]
    deadline = time.monotonic() + GONE_SECONDS
    while (done := subprocess.run(words, capture_output=True, text=True)).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no invite: {done.stderr}")
    made = json.loads(done.stdout)
    file = folder / f"{name}.token"
    file.write_text(made["token"])
    return [str(PROGRAMS / "pier-node"), *made["command"].split()[1:], "--token-file", str(file)]


@contextmanager
def running(work: Path, run: str, count: int, waits: bool = False, witness: bool = False) -> Iterator[list[Site]]:
    """Sites of a run of their own, started; killed in the end.

    Args:
        run: the text of its run.toml.
        waits: no round without all of them.
        witness: they have a coordinator, which is the witness, and comes last.
    """
    environment = hooked(HOOK, PIER_BENCH_PACE=PACE, PIER_BENCH_WAITS=int(waits))
    folders = [work / f"site-{number}" for number in range(count)]
    addresses = [f"127.0.0.1:{free_port()}" for _ in folders]
    with ExitStack() as stack:
        last = list[Site]()
        if witness:
            at = ["--listen", f"127.0.0.1:{free_port()}", "--page", f"127.0.0.1:{free_port()}"]
            home = work / "coordinator"
            last = [Site([str(PROGRAMS / "pier-coordinator"), "start", str(home), *at], home, environment)]
            stack.callback(last[0].kill)
            commands = invited(last[0], run, folders, addresses)
        else:
            file = work / "run.toml"
            file.write_text(run)
            commands = start_commands(file, folders, addresses)
        sites = []
        for folder, command in zip(folders, commands, strict=True):
            sites.append(Site([*command, "--workers", "1"], folder, environment))
            stack.callback(sites[-1].kill)
            sites[-1].start()
        yield [*sites, *last]
