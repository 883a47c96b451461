"""The log lines of a command: coloured on a terminal, plain lines elsewhere, or JSON for log collectors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.logging import RichHandler

LEVELS = {getattr(logging, name): name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""Python's own names, because hivemind renames levels."""

log = logging.getLogger(__name__)


class _Json(logging.Formatter):
    """A JSON object for each line: time, level, logger, message and, if there is one, the traceback."""

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
        quiet: print warnings and errors only.
        as_json: print a JSON object for every line, even on a terminal.

    Returns:
        A function that prints what is not a log line, such as a command to copy: as it is, or as JSON too.
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
            print_as_is(console, text)

    return say


def print_as_is(console: Console, text: str) -> None:
    """Print text to be copied, or that others made: brackets are no markup, nothing is coloured, lines are not cut."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
