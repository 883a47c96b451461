"""Where log lines of a command go: coloured on a terminal, elsewhere one line each, or JSON for collectors of logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.logging import RichHandler

LEVELS = {getattr(logging, name): name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""Python's own names: hivemind gives levels others."""

log = logging.getLogger(__name__)


class _Json(logging.Formatter):
    """One object a line: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": LEVELS.get(record.levelno, record.levelname),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def log_to(console: Console, quiet: bool, as_json: bool = False) -> Callable[[str], None]:
    """Print log lines from now on.

    Args:
        console: for people who look on.
        quiet: warnings and errors only.
        as_json: a JSON object for every line, whoever looks on.

    Returns:
        What prints news that are no log lines, such as a command to copy: as they are, or as JSON too.
    """
    handler: logging.Handler
    if as_json:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(_Json())
    elif console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format="[%X]")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:  # never wrapped: people search such lines
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler])

    def say(text: str) -> None:
        if as_json:
            log.info("%s", text)
        elif not quiet:
            console.print(text, highlight=False, soft_wrap=True)

    return say
