"""The training of a demo, from the start of the first site until all have ended.

It observes the sites from outside, as any program could: GET /status, and the lines of events.jsonl.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import aiohttp

from pier_node.base.errors import PierError
from pier_node.demo.picture import Screen
from pier_node.demo.record import Record, Status, Track
from pier_node.demo.sites import PATIENCE, Site, Sites
from pier_node.rounds.folder import EVENTS_FILE

TIMEOUT = 2.0
"""Seconds that a site may take to answer; a busy site is asked again."""


class Watch:
    """Keeps a record up to date; an asynchronous context manager."""

    def __init__(self, sites: list[Site], record: Record) -> None:
        self._sites, self._record = sites, record
        self._read = dict.fromkeys((site.name for site in sites), 0)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

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
        whole = new[: new.rfind(b"\n") + 1]
        self._read[site.name] += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


TICK = 0.25
"""Seconds between two looks at the sites."""
STILL = 180.0
"""Seconds without news after which a demo gives up."""
T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train(sites: Sites, run: Path, record: Record, screen: Screen) -> float:
    """Run the training, fill the record and display it.

    Returns the seconds until the last round; all sites have then ended.

    Raises:
        PierError: sites died and the remaining ones cannot continue, or nothing happened for a long time.
        KeyboardInterrupt: on any of SIGNALS; all sites have then ended, too.
    """
    seconds = asyncio.run(interruptible(sites, _Training(sites, run, record, screen).run()))
    if seconds is None:
        raise KeyboardInterrupt
    return seconds


async def interruptible(sites: Sites, work: Coroutine[None, None, T]) -> T | None:
    """The result of the work; None: one of SIGNALS came first. All sites have ended when this returns."""
    task, ending = asyncio.create_task(work), asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    end = asyncio.create_task(ending.wait())
    await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
    end.cancel()
    task.cancel()
    await asyncio.wait([task])
    await sites.stop()
    return None if task.cancelled() else task.result()


class _Training:
    def __init__(self, sites: Sites, run: Path, record: Record, screen: Screen) -> None:
        self._sites, self._run, self._record, self._screen = sites, run, record, screen
        self._told: set[str] = set()
        self._news: object = None
        self._news_at = 0.0

    async def run(self) -> float:
        clock = asyncio.get_running_loop().time
        began = self._news_at = clock()
        async with Watch(self._sites.all, self._record) as watch:
            page = await self._sites.start(self._run)
            self._screen.tell(f"The run's page: {page}")
            while not self._record.finished:
                await asyncio.sleep(TICK)
                await watch.look()
                self._screen.show(self._record, clock() - began)
                self._mourn()
                self._require_news(clock())
            seconds = clock() - began
            await self._sites.ended(PATIENCE)
            await watch.look()
        return seconds

    def _mourn(self) -> None:
        """Report a site that ended too early with the end of its log.

        Raises PierError if the others cannot continue.
        """
        lost = [site for site in self._sites.all if self._record.tracks[site.name] in self._record.lost]
        if self._record.hopeless:
            remedy = "The others cannot go on without it. Mend what its log shows, and start the demo again."
            raise PierError("\n".join(site.obituary for site in lost), remedy)
        for site in lost:
            if site.name not in self._told:
                self._told.add(site.name)
                self._screen.tell(f"{site.obituary}\nThe other sites go on without it.")

    def _require_news(self, now: float) -> None:
        news = [_pulse(track) for track in self._record.tracks.values()]
        if news != self._news:
            self._news, self._news_at = news, now
        if now - self._news_at > STILL:
            states = "\n".join(self._state(site) for site in self._sites.all)
            raise PierError(f"nothing has happened for {STILL:.0f} seconds\n{states}", "Mend what the logs show.")

    def _state(self, site: Site) -> str:
        status = self._record.tracks[site.name].status
        state = f"{status['phase']}, round {status['round']}; {status['message']}" if status else "no answer yet"
        return f"{site.name}: {state}; {site.log} ends with:\n{site.tail()}"


def _pulse(track: Track) -> tuple[object, ...]:
    return track.round, track.code, *(track.status.get(key) for key in ("phase", "inner_step", "bytes_sent"))
