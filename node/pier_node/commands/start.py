"""`pier-node start`: runs a daemon in this terminal, reports what happens, and ends it cleanly on Ctrl+C."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys

from rich.console import Console
from rich.logging import RichHandler

from pier_node.base.errors import PierError
from pier_node.base.processes import die_with_parent
from pier_node.site.settings import Settings

FULL = (errno.ENOSPC, errno.EDQUOT)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_site(settings: Settings, quiet: bool) -> None:
    """Run until the run is finished or the user stops it. Raises PierError."""
    console = Console()
    handler = RichHandler(console=console, show_path=False, show_level=True, log_time_format="[%X]")
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, format="%(message)s", handlers=[handler])
    asyncio.run(_run(settings, console, quiet))


async def _run(settings: Settings, console: Console, quiet: bool) -> None:
    from pier_node.site.daemon import Daemon

    def say(text: str) -> None:
        if not quiet:
            console.print(text, highlight=False, soft_wrap=True)  # a command to copy must stay on one line

    daemon = Daemon(settings, say, on_terminal=sys.stdout.isatty())
    if settings.program_socket:
        die_with_parent(signal.SIGTERM)

    def stop() -> None:
        if daemon.stopping:
            os._exit(130)
        console.print("Leaving the run; once more to leave at once.")
        daemon.stop()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await daemon.run()
    except OSError as error:
        if error.errno not in FULL:
            raise
        problem = f"{error.filename or settings.folder}: {error.strerror}"
        raise PierError(problem, "Free some space there and start again.") from error
