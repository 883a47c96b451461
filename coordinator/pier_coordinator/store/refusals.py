"""Reasons why the coordinator refuses a request; every message says what is wrong and what to do next."""

from __future__ import annotations


class Refused(Exception):
    """The request is not possible in the current state: something must be changed first."""


class Stranger(Exception):
    """The caller does not, or no longer, belong to the run."""


class Unregistered(Exception):
    """The caller belongs to the run but has no lease: it must register."""


class Superseded(Exception):
    """The same site has been started again and has registered since."""


class TooFast(Exception):
    """The caller has exceeded its rate limit, or another such call of it is under way; it may retry after `seconds`."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds
