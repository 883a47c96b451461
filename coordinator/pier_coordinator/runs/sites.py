"""What the board knows of one site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pier_coordinator.runs.series import Series, rounded
from pier_coordinator.runs.timings import Segments
from pier_coordinator.store.facts import number, text, whole

SITE_POINTS = 240
"""Points of each curve of a site."""

SILENT_AFTER = 60.0
"""Seconds after which a site that never sent a pulse, as in a replay, counts as silent: six of its samples."""

LIVE = ("inner_step", "tokens", "tokens_per_second", "loss", "validation_loss", "bytes_sent", "utilisation", "memory")
REVOKED = "revoked"
GONE = ("done", "leaving", "left", REVOKED)
IDLE = ("silent", "paused", *GONE)
"""States of a site that trains nothing, whatever speed it told last."""


@dataclass
class Site:
    """A site; numbers that are not known are None.

    Attributes:
        stamp: of its last change.
        lasting: stamp of the last change of what seldom changes: its name, its address, its orders.
        alive: what the last pulse said; None before the first one.
        heard: when something last came from it, by the coordinator's clock.
        offset: seconds that its clock is ahead of the coordinator's.
        dropped: records that it lost because nobody took them for too long.
        first_memory: bytes, in its first sample since it registered.
    """

    node: str
    name: str
    stamp: int = 0
    lasting: int = 0
    address: str = ""
    transport: str = ""
    version: str = ""
    workers: int | None = None
    alive: bool | None = None
    phase: str = ""
    round: int = 0
    heard: float = 0.0
    offset: float | None = None
    dropped: int = 0
    activity: str = ""
    assignment: str = ""
    ending: str = ""
    memory: float | None = None
    first_memory: float | None = None
    inner_step: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    validation_loss: float | None = None
    utilisation: float | None = None
    bytes_sent: float | None = None
    shown: str = ""
    curves: dict[str, Series] = field(
        default_factory=lambda: {
            name: Series(SITE_POINTS) for name in ("loss", "tokens_per_second", "utilisation", "validation_loss")
        }
    )
    segments: Segments = field(default_factory=Segments)

    def registered(self, body: Mapping[str, Any]) -> None:
        """It has started."""
        self.name = text(body, "name")[:64] or self.name
        self.address, self.transport, self.version = (text(body, key) for key in ("address", "transport", "version"))
        self.workers = whole(body, "workers")
        self.phase, self.ending, self.first_memory = "starting", "", None

    def measured(self, body: Mapping[str, Any]) -> None:
        """Take in the numbers that a sample or a pulse has; what it leaves out stays."""
        for key in LIVE:
            if key in body:
                setattr(self, key, number(body, key))
        self.dropped = max(self.dropped, whole(body, "dropped") or 0)
        self.first_memory = self.first_memory or self.memory

    def reached(self, round: int | None) -> None:
        """It has committed a round; news of an earlier one changes nothing."""
        self.round = max(self.round, round or 0)

    @property
    def speed(self) -> float | None:
        """Tokens a second that it trains at now, as of the last look at its state; None: it has never said."""
        return 0.0 if self.tokens_per_second is not None and self.shown in IDLE else self.tokens_per_second

    def state(self, now: float, started: float, rounds: int) -> str:
        """A word: its phase, or why it has none."""
        if self.ending:
            return self.ending
        finished = self.phase in GONE or (rounds > 0 and self.round >= rounds)
        quiet = now - max(self.heard, started) > SILENT_AFTER if self.alive is None else not self.alive
        if quiet:
            return ("left" if self.phase == "leaving" else "done") if finished else "silent"
        return self.phase or "training"

    def row(self, top: int, uplink: float | None, since: int = 0) -> dict[str, Any]:
        """For JSON; `top` is the newest round of any site. What seldom changes is left out if told at stamp `since`."""
        return {
            "node": self.node,
            **(self._card() if self.lasting >= since else {}),
            "state": self.shown,
            "round": self.round,
            "lag": 0 if self.ending else max(0, top - self.round),
            **{key: rounded(getattr(self, key)) for key in LIVE if key not in ("tokens", "bytes_sent", "memory")},
            "tokens_per_second": rounded(self.speed),
            **{key: getattr(self, key) for key in ("tokens", "bytes_sent", "memory")},
            "uplink": rounded(uplink),
            "heard": round(self.heard, 1),
        }

    def _card(self) -> dict[str, Any]:
        return {
            key: getattr(self, key)
            for key in ("name", "activity", "assignment", "address", "transport", "version", "workers")
        }
