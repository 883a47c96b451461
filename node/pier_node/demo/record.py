"""What a demo observes of its sites, and all conclusions that it displays, draws and reports.

It observes them from outside, as any program could: GET /status, and the lines of events.jsonl.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import aiohttp

from pier_node.config.run import RunConfig
from pier_node.demo.sites import Site
from pier_node.outer.layout import Layout
from pier_node.outer.schedule import start_steps, total_rounds
from pier_node.rounds.folder import EVENTS_FILE, read_events

TIMEOUT = 2.0
"""Seconds that a site may take to answer; a busy site is asked again."""

Status = dict[str, Any]
Curve = list[tuple[int, float]]
"""(inner step, nats per token), in the order of the steps."""


@dataclass
class Track:
    """One site, observed from outside.

    Attributes:
        status: its last answer; empty: none yet.
        event: the last line of its events.jsonl, one per committed round; empty: none yet.
        loss: its training loss.
        code: exit code of its daemon, once it has ended.
    """

    name: str
    status: Status = field(default_factory=dict)
    event: Status = field(default_factory=dict)
    loss: Curve = field(default_factory=list)
    code: int | None = None

    @property
    def round(self) -> int:
        """The last round that it committed; -1: none, it has no state yet."""
        return int(self.event.get("round", -1))

    @property
    def bytes_sent(self) -> int:
        """Bytes sent up to its last round."""
        return int(self.event.get("bytes_sent", 0))

    def saw_status(self, status: Status) -> None:
        """Record an answer of the site."""
        self.status = status
        self._saw_loss(status)

    def saw_event(self, event: Status) -> None:
        """Record a committed round."""
        self.event = event
        self._saw_loss(event)

    def _saw_loss(self, status: Status) -> None:
        step, loss = status["inner_step"], status["loss"]
        if loss is not None and (not self.loss or step > self.loss[-1][0]):
            self.loss.append((step, loss))


class Record:
    """All sites of the demo, from /status and events.jsonl of each."""

    def __init__(self, config: RunConfig, names: list[str]) -> None:
        self.config = config
        self.parameters = Layout.of(config.model).length
        self.rounds = total_rounds(config)
        self.start_steps = start_steps(config) if config.outer.start == "solo" else 0
        self.tracks = {name: Track(name) for name in names}
        self._digests: dict[int, dict[str, str]] = {}
        self._validation: dict[int, dict[str, float]] = {}

    def saw_event(self, name: str, event: Status) -> None:
        """Record that a site has committed a round, or begins at round 0."""
        number = event["round"]
        self.tracks[name].saw_event(event)
        self._digests.setdefault(number, {})[name] = event["digest"]
        between = self.config.inner.eval_every or self.rounds
        fresh = number % between == 0 or number == self.rounds
        if fresh and event["validation_loss"] is not None:
            self._validation.setdefault(event["inner_step"], {})[name] = event["validation_loss"]

    @property
    def synchronous_bytes(self) -> float:
        """Bytes that each site would send if gradients were averaged at every step: 2 · 4 · P · (n − 1) / n per step.

        This is a ring all-reduce of P fp32 numbers among n sites (Patarasuk and Yuan, JPDC 69, 2009), the minimum.
        """
        sites = self.config.run.sites
        return 2 * 4 * self.parameters * (sites - 1) / sites * self.config.inner.total_steps

    @property
    def validation(self) -> Curve:
        """Validation loss of the anchor, which all sites share; with noloco, the mean over the sites' own anchors."""
        return [(step, fmean(losses.values())) for step, losses in sorted(self._validation.items())]

    @property
    def apart(self) -> bool:
        """Whether each site has its own model."""
        return self.config.outer.algorithm == "noloco"

    @property
    def spread(self) -> float | None:
        """Spread of the replicas as last seen by pairs, averaged over sites; None: not known, or there is none."""
        known = [spread for track in self.tracks.values() if (spread := track.event.get("spread")) is not None]
        return fmean(known) if known else None

    @property
    def newest(self) -> Track:
        """A site that no other is ahead of."""
        return max(self.tracks.values(), key=lambda track: track.round)

    @property
    def alive(self) -> list[Track]:
        """Sites whose daemon has not ended."""
        return [track for track in self.tracks.values() if track.code is None]

    @property
    def lost(self) -> list[Track]:
        """Sites whose daemon has ended before the run."""
        return [track for track in self.tracks.values() if track.code is not None and track.round < self.rounds]

    @property
    def finished(self) -> bool:
        """Whether every remaining site has committed the last round."""
        kept = [track for track in self.tracks.values() if track not in self.lost]
        return bool(kept) and all(track.round >= self.rounds for track in kept)

    @property
    def hopeless(self) -> bool:
        """Whether the remaining sites cannot continue: they have no quorum, or the run waits for all sites to begin."""
        if not self.lost:
            return False
        if self.apart:  # only the first round waits for all
            return not self.alive or self.newest.round < 1
        members = self.newest.event.get("members", [])
        if len(members) < 2 or not self.alive:
            return True
        # A site that left politely has handed over its vote.
        gone = [track for track in self.lost if track.code != 0 and track.status.get("node") in members]
        return 2 * (len(members) - len(gone)) <= len(members)

    @property
    def pulse(self) -> list[object]:
        """Changes as long as anything happens at any site."""
        keys = "phase", "inner_step", "bytes_sent"
        return [(it.round, it.code, *(it.status.get(key) for key in keys)) for it in self.tracks.values()]

    @property
    def compared(self) -> int:
        """Number of rounds after which the digests of at least two sites were compared."""
        return sum(len(digests) > 1 for digests in self._digests.values())

    @property
    def forks(self) -> list[int]:
        """Rounds after which two sites held different bits although they share a model: there must be none."""
        if self.apart:
            return []
        return [number for number, digests in sorted(self._digests.items()) if len(set(digests.values())) > 1]

    @property
    def digest(self) -> str:
        """Digest of the latest round that at least two sites have reported; empty: there is none."""
        shared = [number for number, digests in self._digests.items() if len(digests) > 1]
        return next(iter(self._digests[max(shared)].values())) if shared else ""


class Watch:
    """Keeps a record of sites up to date."""

    def __init__(self, sites: list[Site], record: Record, session: aiohttp.ClientSession) -> None:
        self._sites, self._record, self._session = sites, record, session
        self._read = {site.name: 0 for site in sites}

    async def look(self) -> None:
        """Record what is new at every site."""
        await asyncio.gather(*(self._ask(site) for site in self._sites))
        for site in self._sites:
            code = site.code  # before the events: a site that has ended has written all of them
            for event in self._events(site):
                self._record.saw_event(site.name, event)
            self._record.tracks[site.name].code = code

    async def _ask(self, site: Site) -> None:
        http = site.http()
        if http is None or not site.running:
            return
        try:
            async with self._session.get(f"{http}/status") as response:
                self._record.tracks[site.name].saw_status(await response.json())
        except (aiohttp.ClientError, TimeoutError):
            pass  # busy or gone; if gone, its exit code says more

    def _events(self, site: Site) -> list[Status]:
        path = site.folder / EVENTS_FILE
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[site.name])
            new = file.read()
        self._read[site.name] += new.rfind(b"\n") + 1
        return read_events(new)


@asynccontextmanager
async def watching(sites: list[Site], record: Record) -> AsyncIterator[Watch]:
    """Something that looks at the sites whenever it is asked to, and records what it sees."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session:
        yield Watch(sites, record, session)
