"""Why the coordinator does not do what it was asked; every text says what is wrong and what to do next."""

from __future__ import annotations


class Refused(Exception):
    """What was asked cannot be had as things are; somebody has to change something first."""


class Stranger(Exception):
    """The caller is not of the run, or not any more."""


class Unregistered(Exception):
    """The caller is of the run, but has no lease: it shall register."""


class Superseded(Exception):
    """Another start of the same site has registered since."""


class TooFast(Exception):
    """The caller asks more often than one may; `seconds` later it may ask again."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds
