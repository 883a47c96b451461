"""Looks at the sites from outside, as any program could: GET /status, and the lines of events.jsonl."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Self

import aiohttp

from pier_node.demo.record import Record, Status
from pier_node.demo.sites import Site
from pier_node.site import EVENTS_FILE

TIMEOUT = 2.0
"""Seconds that a site may take to answer; it may be busy, and is asked again."""


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
        """Take in what is new at every site."""
        await asyncio.gather(*(self._ask(site) for site in self._sites))
        for site in self._sites:
            code = site.code  # before the events: one that has ended has written all of them
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
            pass  # busy, or gone: then its exit code says more

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
