"""One site on the board."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pier_coordinator.runs.series import Series, rounded
from pier_coordinator.runs.timings import Segments
from pier_coordinator.store.facts import number, text, whole

SITE_POINTS = 240
"""Maximum number of points of each curve of a site."""

LINES = 50
"""Lines of a site's log that are kept."""

SILENT_AFTER = 60.0
"""Seconds after which a site that never sent a pulse counts as silent: the time of six samples."""

LIVE = ("inner_step", "tokens", "tokens_per_second", "loss", "validation_loss", "bytes_sent", "utilisation", "memory")
IF_TOLD = ("device_memory", "mfu", "cpu", "gradient_norm")
"""Numbers of a sample that are not known if they are 0."""
CURVES = ("loss", "gradient_norm", "tokens_per_second", "utilisation")
"""Numbers of a sample that have a curve."""
REVOKED = "revoked"
GONE = ("done", "leaving", "left", REVOKED)
IDLE = ("silent", "paused", "starting", "catching up", *GONE)
"""States of a site that does not train, whatever speed it reported last."""


@dataclass
class Site:
    """A site; numbers that are not known are None.

    Attributes:
        stamp: stamp of its last change.
        lasting: stamp of the last change of what seldom changes: its name, its address, its orders.
        alive: as of its last pulse; None before the first one.
        heard: when something last arrived from it, in seconds since the epoch by the coordinator's clock.
        offset: seconds by which its clock is ahead of the coordinator's.
        dropped: number of records that it lost because it could not deliver them for too long.
        lines: the last lines of its log: when, level as of Python's logging, text.
        first_memory: memory in its first sample since it registered, in bytes.
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
    device: str = ""
    device_memory: float | None = None
    mfu: float | None = None
    cpu: float | None = None
    gradient_norm: float | None = None
    shown: str = ""
    curves: dict[str, Series] = field(
        default_factory=lambda: {name: Series(SITE_POINTS) for name in (*CURVES, "validation_loss")}
    )
    segments: Segments = field(default_factory=Segments)
    lines: deque[tuple[float, int, str]] = field(default_factory=lambda: deque(maxlen=LINES))

    def registered(self, body: Mapping[str, Any]) -> None:
        """Take in its registration: it has started."""
        self.name = text(body, "name")[:64] or self.name
        self.address, self.transport, self.version = (text(body, key) for key in ("address", "transport", "version"))
        self.workers = whole(body, "workers")
        self.phase, self.ending, self.first_memory = "starting", "", None

    def measured(self, body: Mapping[str, Any]) -> None:
        """Take in the numbers of a sample or a pulse; those that are missing stay as they are."""
        for key in LIVE:
            if key in body:
                setattr(self, key, number(body, key))
        for key in IF_TOLD:
            if key in body:
                setattr(self, key, number(body, key) or None)
        self.device = text(body, "device")[:200] or self.device
        self.dropped = max(self.dropped, whole(body, "dropped") or 0)
        self.first_memory = self.first_memory or self.memory

    def reached(self, round: int | None) -> None:
        """Take in a round that it has committed; an earlier round changes nothing."""
        self.round = max(self.round, round or 0)

    @property
    def speed(self) -> float | None:
        """Tokens per second, 0 if it was idle when its state was last updated; None: never reported."""
        return 0.0 if self.tokens_per_second is not None and self.shown in IDLE else self.tokens_per_second

    def state(self, now: float, started: float, rounds: int) -> str:
        """Its state in a word: its phase, or why it has none."""
        if self.ending:
            return self.ending
        finished = self.phase in GONE or (rounds > 0 and self.round >= rounds)
        quiet = now - max(self.heard, started) > SILENT_AFTER if self.alive is None else not self.alive
        if quiet:
            return ("left" if self.phase == "leaving" else "done") if finished else "silent"
        return self.phase or "training"

    def row(self, top: int, uplink: float | None, since: int = 0) -> dict[str, Any]:
        """The row for JSON; `top` is the newest round of any site.

        What seldom changes is left out if it has not changed since the stamp `since`.
        """
        return {
            "node": self.node,
            **(self._card() if self.lasting >= since else {}),
            "state": self.shown,
            "round": self.round,
            "lag": 0 if self.ending else max(0, top - self.round),
            **{key: rounded(getattr(self, key)) for key in LIVE if key not in ("tokens", "bytes_sent", "memory")},
            "tokens_per_second": rounded(self.speed),
            **{key: getattr(self, key) for key in ("tokens", "bytes_sent", "memory")},
            **{key: rounded(getattr(self, key)) for key in IF_TOLD},
            "uplink": rounded(uplink),
            "heard": round(self.heard, 1),
        }

    def _card(self) -> dict[str, Any]:
        return {
            key: getattr(self, key)
            for key in ("name", "activity", "assignment", "address", "transport", "version", "workers", "device")
        }
