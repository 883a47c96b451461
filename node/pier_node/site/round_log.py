"""The line in a site's log for each committed round: how far the run is, how it goes here, how long it will take."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable

from pier_node.base.units import amount, count, percent, seconds, span
from pier_node.outer.state import OuterState
from pier_node.rounds.progress import Progress
from pier_node.wire.carrier import Carrier

RECENT = 20
"""Rounds by whose pace the rest of the run is predicted."""

log = logging.getLogger(__name__)


class RoundLog:
    """Logs committed rounds.

    Args:
        steps: number of inner steps of the whole run.
        clock: returns seconds.
    """

    def __init__(
        self, steps: int, progress: Progress, carrier: Carrier, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps, self._progress, self._carrier, self._clock = steps, progress, carrier, clock
        self._sent = carrier.bytes_sent()
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)

    def committed(self, state: OuterState) -> None:
        """Log a round."""
        told = ", ".join(part for part in (*self._training(state), *self._round(), self._left()) if part)
        log.info("round %d committed by %d: %s", state.round, len(state.members), told)

    def _training(self, state: OuterState) -> list[str]:
        progress = self._progress
        fresh = progress.validated_round == state.round
        return [
            f"step {count(progress.inner_step)} of {count(self._steps)}",
            "" if math.isnan(progress.loss) else f"loss {progress.loss:.4f}",
            f"validation loss {progress.validation_loss:.4f}" if fresh else "",
            f"{count(progress.tokens_per_second)} tokens/s" if progress.tokens_per_second else "",
            f"MFU {percent(progress.device.mfu(progress.tokens_per_second))}" if progress.device.full_speed else "",
            f"{amount(progress.device.peak_bytes)} of GPU memory" if progress.device.peak_bytes else "",
        ]

    def _round(self) -> list[str]:
        before, self._sent = self._sent, self._carrier.bytes_sent()
        sent = self._sent - before
        if not sent:
            return []
        return [f"{seconds(self._progress.times.exchange)} of exchange", f"{amount(sent)} sent"]

    def _left(self) -> str:
        self._ends.append((self._progress.inner_step, self._clock()))
        (first, began), (last, now) = self._ends[0], self._ends[-1]
        left = self._steps - last
        if last <= first or left <= 0:
            return ""
        return f"{span((now - began) / (last - first) * left)} left"
