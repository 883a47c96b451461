"""`pier-node start`, `stop` and `status`: the daemon of a site on this machine.

start runs it in this terminal, reports what happens, and ends it cleanly on Ctrl+C. stop ends it politely. status shows
what it and its peers are doing, or what is on the disk of a site that does not run; its tables are for people: numbers
have units, and nothing is expressed by colour alone.

On a terminal, start shows two lines below the log: the round, its steps, the loss, the time left, who waits. Where
output is no terminal there is none, and none while a program of the site's owner prints there itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pier_node.base.durable import FULL, unwritable
from pier_node.base.errors import PierError
from pier_node.base.log import log_to
from pier_node.base.tasks import cancel_and_wait, when_stopped
from pier_node.base.units import UNKNOWN, age, amount, count, number, percent, several, span
from pier_node.engine.training_process import PROGRAM_VARIABLE
from pier_node.rounds.folder import DAEMON_FILE, load_run, require_folder
from pier_node.site.running import Running, Status, find_daemon, on_disk, start_command, to_continue
from pier_node.site.settings import Settings


def run_site(settings: Settings, quiet: bool, log_json: bool) -> None:
    """Run until the run is finished or the user stops it. Raises PierError."""
    from pier_node.site.join import with_run_here

    console = Console()
    say = log_to(console, quiet, log_json)
    lively = console.is_terminal and not (console.is_dumb_terminal or quiet or log_json or settings.has_program)
    try:
        asyncio.run(_run(with_run_here(settings), say, console if lively else None))
    finally:
        if settings.early and settings.early.waits:
            settings.early.tell({})


async def _run(settings: Settings, say: Callable[[str], None], lively: Console | None) -> None:
    from pier_node.doctor.machine import check_machine
    from pier_node.site.daemon import Daemon  # with much that stop and status do not need

    daemon = Daemon(settings, say, sys.stdout.isatty(), check_machine)
    view = LiveView(lively, daemon.status) if lively else None
    again = start_command(settings.folder, settings.program)

    def leave() -> None:
        if daemon.stopping:
            if view:
                view.stop()
            say(f"Left at once. To continue from the last checkpoint:\n\n  {again}\n")
            os._exit(130)
        say("Leaving the run; once more to leave at once.")
        daemon.stop()

    when_stopped(leave)
    if settings.program_socket:
        _when_ended(int(os.environ[PROGRAM_VARIABLE]), leave)
    try:
        async with view.shown() if view else nullcontext():
            await daemon.run()
        if daemon.stopping and load_run(settings.folder):
            say(f"The site has left the run. To continue:\n\n  {again}\n")
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise unwritable(str(error.filename or settings.folder), error) from error


def _when_ended(program: int, call: Callable[[], None]) -> None:
    """Call it when a process has ended, or now. For prctl(2) a program ends with the thread that called pier.join."""
    loop = asyncio.get_running_loop()
    try:
        handle = os.pidfd_open(program)
    except ProcessLookupError:
        call()
        return

    def ended() -> None:
        loop.remove_reader(handle)
        call()

    loop.add_reader(handle, ended)


def stop(folder: Path, timeout: float) -> str:
    """Ask the daemon to leave and wait until it has ended. Returns the message for the user.

    Raises:
        PierError: it did not end within `timeout` seconds, or belongs to another user.
    """
    require_folder(folder)
    running = find_daemon(folder)
    if running is None:
        return f"No daemon runs for {folder}{_clean_up(folder)}."
    with _handle(running) as handle:
        # The handle refers to the process that was found only if that process is still the daemon now.
        if handle is None or find_daemon(folder) != running:
            return f"The daemon of {folder} ended by itself{_clean_up(folder)}."
        began = time.monotonic()
        _terminate(handle, running)
        if not select.select([handle], [], [], timeout)[0]:
            raise _stubborn(running, timeout)
        took = time.monotonic() - began
    if (folder / DAEMON_FILE).exists():
        return f"The daemon (process {running.pid}) died after {took:.1f} s without leaving the run{_clean_up(folder)}."
    return f"The site has left the run and ended, in {took:.1f} s. To continue:\n\n  {to_continue(folder)}\n"


@contextmanager
def _handle(running: Running) -> Iterator[int | None]:
    """A descriptor of the process, which cannot come to refer to another one; None: the process has ended."""
    try:
        descriptor = os.pidfd_open(running.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _terminate(handle: int, running: Running) -> None:
    try:
        with suppress(ProcessLookupError):  # it has just ended: the wait for that is short
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except PermissionError as error:
        raise PierError(
            f"process {running.pid} belongs to another user", "Stop it as the user that started it."
        ) from error


def _stubborn(running: Running, timeout: float) -> PierError:
    return PierError(
        f"the daemon (process {running.pid}) was asked to leave and has not ended within {timeout:g} s",
        f"Its log says what it waits for. Run `pier-node stop --data {running.folder}` again: asked twice, it ends "
        f"at once and continues from its last checkpoint when started again. As a last resort: kill -9 {running.pid}",
    )


def _clean_up(folder: Path) -> str:
    """Remove what a dead daemon left. Returns a message about it."""
    path = folder / DAEMON_FILE
    if not path.exists():
        return ""
    path.unlink()
    return f"; {path} of one that died was removed"


DIGITS = 12
"""Hex digits of a digest to show."""


def site_table(status: Status) -> RenderableType:
    """This site and its run."""
    members, device, logged = len(status["members"]), "", ""
    if name := status.get("device"):
        memory = f"; {amount(status['device_bytes'])} of memory" if status["device_bytes"] else ""
        mfu = f"; MFU {percent(status['mfu'])}" if status["mfu"] is not None else ""
        device = f"{name}{memory}{mfu}"
    if metrics := status["metrics"]:
        logged = ", ".join(f"{name} {it if isinstance(it, str) else number(it, 4)}" for name, it in metrics.items())
    steps = f"{count(status['inner_step'])} of {count(status['total_steps'])}"
    spread = f"spread {_spread(status['spread'])}, {_spread(status['mean_spread'])} over all sites"
    rows = {
        "run": f"{status['run']} ({status['run_hash'][:8]})",
        "round": f"{status['round']} of {status['rounds']}, step {steps}",
        "state": f"digest {status['digest'][:DIGITS] or UNKNOWN}, made by {several(members, 'site')}",
        "fingerprint": status["fingerprint"],
        "phase": status["phase"],
        "expert": escape(status["expert"]),
        "loss": f"{number(status['loss'], 4)}, validation {number(status['validation_loss'], 4)} (nats a token)",
        "speed": f"{count(status['tokens_per_second'])} tokens/s; {count(status['tokens'])} tokens so far",
        "sent": f"{amount(status['bytes_sent'])}; last outer round {number(status['round_seconds'], 2)} s",
        "utilisation": f"{percent(status['utilisation'])} of the time in inner steps",
        "device": escape(device),
        "logged": escape(logged),
        "replicas": spread if _in_pairs(status) else "",
        "message": escape(status["message"]),
    }
    address = escape(status["address"]) or "no address yet"
    return _pairs(f"{escape(status['name'])} ({status['node']}) at {address}", rows)


def peers_table(status: Status) -> RenderableType:
    """The other sites, and the last errors of those that do not answer."""
    peers = status["peers"]
    if not peers:
        return "No other site is known yet."
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("site", overflow="fold")
    for name in ("phase", "round"):
        table.add_column(name, no_wrap=True)
    table.add_column("spread" if _in_pairs(status) else "same state", no_wrap=True)
    for name in ("loss", "tokens/s", "ms away"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("alive", no_wrap=True)
    for peer in peers:
        table.add_row(*_peer_row(peer, status))
    silent = [peer for peer in peers if not peer["alive"] and peer["last_error"]]
    notes = [f"{_called(peer)} is silent: {escape(peer['last_error'])}" for peer in silent]
    return Group(table, *notes)


def disk_table(found: dict[str, Any]) -> RenderableType:
    """A site that does not run."""
    rows = {"on disk": "no run: this folder has not been started yet"}
    if "run" in found:
        rows = {"run": f"{found['run']} ({found['run_hash'][:8]})", "on disk": _saved(found)}
    return _pairs(f"No daemon runs for {escape(found['data'])}.", rows | {"start it": escape(found["command"])})


def _pairs(title: str, rows: Mapping[str, str]) -> Table:
    """Names and texts; what is empty is left out."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, title=title, title_justify="left", pad_edge=False)
    table.title_style = "bold"
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    return table


def _peer_row(peer: Status, status: Status) -> list[str]:
    away = f"{1000 * peer['round_trip']:.1f}" if peer["round_trip"] else UNKNOWN
    alive = "yes" if peer["alive"] else "[red]no[/red]"
    agreement = _spread(peer["spread"]) if _in_pairs(status) else _agreement(peer, status)
    speed = count(peer["tokens_per_second"])
    return [_called(peer), peer["phase"], str(peer["round"]), agreement, number(peer["loss"], 3), speed, away, alive]


def _in_pairs(status: Status) -> bool:
    """Whether every site has its own state."""
    return bool(status["algorithm"] == "noloco")


def _spread(value: float | None) -> str:
    """Standard deviation of a weight between replicas."""
    return UNKNOWN if value is None else f"{value:.2e}"


def _agreement(peer: Status, status: Status) -> str:
    """Whether a peer has the same state. Digests can be compared only at the same round."""
    if not (peer["digest"] and status["digest"]):
        return UNKNOWN
    if peer["round"] != status["round"]:
        return "ahead" if peer["round"] > status["round"] else "behind"
    return "[green]✓ yes[/green]" if peer["digest"] == status["digest"] else "[bold red]✗ NO[/bold red]"


def _called(peer: Status) -> str:
    return escape(peer["name"]) or str(peer["node"])


def _saved(found: dict[str, Any]) -> str:
    if "round" not in found:
        return f"no checkpoint yet of {several(found['rounds'], 'round')}"
    saved = f"round {found['round']} of {found['rounds']}, digest {found['digest'][:DIGITS]}"
    return f"{saved}, saved {age(found['age_seconds'])} ago"


NOT_RUNNING = 3
"""Exit code; an init script uses the same one for a service that is not running."""
EVERY = 1.0
"""Seconds between two updates of --watch."""


def status(folder: Path, as_json: bool, watch: bool) -> int:
    """Print the status, once or until Ctrl+C. Returns the exit code.

    Raises:
        PierError: there is no such folder, or the daemon does not answer a single request.
    """
    require_folder(folder)
    console = Console()
    running = find_daemon(folder)
    if running is None:
        return _show_disk(folder, console, as_json)
    if not watch:
        _show(running.status(), as_json, console.print)
        return 0
    try:
        _follow(folder, running, console, as_json)
    except KeyboardInterrupt:
        return 0
    return _show_disk(folder, console, as_json)


def _show_disk(folder: Path, console: Console, as_json: bool) -> int:
    found = {"running": False, **on_disk(folder)}
    if as_json:
        print(json.dumps(found))
    else:
        console.print(disk_table(found))
    return NOT_RUNNING


def _show(found: Status, as_json: bool, put: Callable[[RenderableType], None]) -> None:
    if as_json:
        print(json.dumps({"running": True, **found}), flush=True)
    else:
        put(Group(site_table(found), "", peers_table(found)))


def _follow(folder: Path, running: Running, console: Console, as_json: bool) -> None:
    """Show the status repeatedly. Returns when the daemon has ended; a busy daemon is asked again."""
    with Live(console=console, auto_refresh=False) as live:
        put = partial(live.update, refresh=True) if console.is_terminal else console.print
        while find_daemon(folder) == running:
            try:
                found = running.status()
            except PierError as error:
                print(error.problem, file=sys.stderr)
            else:
                _show(found, as_json, put)
            time.sleep(EVERY)


LOOK = 0.5
"""Seconds between two looks."""
LOOKS = 600
"""Looks by whose pace the rest of the run is predicted: five minutes."""
BAR = 24


class LiveView:
    """The view.

    Args:
        status: returns the site's status; None: it has not joined its run yet.
    """

    def __init__(self, console: Console, status: Callable[[], Status | None]) -> None:
        self._status = status
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._seen: deque[tuple[float, int]] = deque(maxlen=LOOKS)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show it; at the end the terminal is as before."""
        self._live.start()
        showing = asyncio.create_task(self._show(), name="live view")
        try:
            yield
        finally:
            await cancel_and_wait(showing)
            self.stop()

    def stop(self) -> None:
        """Take it off the terminal, also where nothing else will be done any more."""
        self._live.stop()

    async def _show(self) -> None:
        while True:
            status = self._status()
            if status is not None:
                self._live.update(self.render(status, time.monotonic()), refresh=True)
            await asyncio.sleep(LOOK)

    def render(self, status: Status, now: float) -> RenderableType:
        """The view of a status, seen at a time in seconds."""
        step, steps = status["inner_step"], status["total_steps"]
        self._seen.append((now, step))
        told = [
            f"{status['phase']}: round {min(status['round'] + 1, status['rounds'])} of {status['rounds']}",
            _within(status),
            f"loss {number(status['loss'], 4)}" if status["loss"] == status["loss"] else "",  # NaN is not itself
            f"{count(status['tokens_per_second'])} tokens/s" if status["tokens_per_second"] else "",
            self._left(steps - step),
        ]
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=steps, completed=step, width=BAR)
        line.add_row(bar, Text(", ".join(filter(None, told)), style="bold", overflow="ellipsis", no_wrap=True))
        return Group(line, Text(_awaited(status), style="yellow", overflow="ellipsis", no_wrap=True))

    def _left(self, left: int) -> str:
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return f"{span((now - began) / (last - first) * left)} left" if last > first and left > 0 else ""


def _within(status: Status) -> str:
    """How far the inner steps of the round are."""
    steps, done = status["round_steps"], status["round_steps_done"]
    return f"step {done} of {steps}" if steps and status["phase"] == "training" else ""


def _awaited(status: Status) -> str:
    """Whom this site waits for: what its round or its start says, or the sites that still train."""
    if status["phase"] not in ("waiting", "catching up"):
        return ""
    if status["message"]:
        return f"waits: {status['message']}"
    trains = [it["name"] or it["node"] for it in status["peers"] if it["alive"] and it["phase"] == "training"]
    return f"waits for {', '.join(trains)}" if trains and status["phase"] == "waiting" else ""
