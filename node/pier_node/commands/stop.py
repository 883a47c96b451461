"""`pier-node stop`: ends a site's daemon politely, and reports the outcome."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pier_node.base.errors import PierError
from pier_node.rounds.folder import DAEMON_FILE, require_folder
from pier_node.site.running import Running, find_daemon, start_command


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
    return f"The site has left the run and ended, in {took:.1f} s. To go on:\n\n  {start_command(folder)}\n"


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
        f"at once and goes on from its last checkpoint when started again. As a last resort: kill -9 {running.pid}",
    )


def _clean_up(folder: Path) -> str:
    """Remove what a dead daemon left. Returns a message about it."""
    path = folder / DAEMON_FILE
    if not path.exists():
        return ""
    path.unlink()
    return f"; {path} of one that died was removed"
