"""Puts the names of sites to the node ids in what people read: they know the one, the protocol knows the other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

_NODE = re.compile(r"(?<![\w(])[0-9a-f]{16}(?!\w)")
"""A node id that has no name to it yet."""

Called = Callable[[str], str]
"""Node id -> name (node id), or the id alone when there is no name."""


def named(text: str, called: Called) -> str:
    """A text with names."""
    return _NODE.sub(lambda found: called(found[0]), text)


class Names(logging.Filter):
    """Of a handler: names the sites in every line."""

    def __init__(self, called: Called) -> None:
        super().__init__()
        self._called = called

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        record.msg, record.args = named(record.getMessage(), self._called), None
        return True


def name_in_logs(called: Called) -> None:
    """From now on, in all that this process logs."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(Names(called))
