"""Where the time of an outer round went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Times:
    """Of one round, in seconds.

    Attributes:
        waiting: for the others.
        exchange: in the attempt that was decided.
        retry: in attempts that were given up.
    """

    waiting: float = 0.0
    exchange: float = 0.0
    retry: float = 0.0

    @contextmanager
    def spent_waiting(self) -> Iterator[None]:
        """Count what is done meanwhile as waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waiting += time.monotonic() - began

    @contextmanager
    def spent_on_attempt(self) -> Iterator[None]:
        """Count what is done meanwhile as an attempt, which fails by raising.

        One that is cancelled has not failed: another member's word that it is committed came before the last vote.
        """
        began, failed = time.monotonic(), False
        try:
            yield
        except Exception:
            failed = True
            raise
        finally:
            spent = time.monotonic() - began
            if failed:
                self.retry += spent
            else:
                self.exchange += spent

    def scaled_to(self, total: float) -> Times:
        """The same shares of another total: of what was hidden behind inner steps, only the rest is seen."""
        own = self.waiting + self.exchange + self.retry
        share = total / own if own > 0 else 0.0
        return Times(self.waiting * share, self.exchange * share, self.retry * share)
