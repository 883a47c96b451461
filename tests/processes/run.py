"""A run under test: its run.toml, its sites, and what must hold for them whatever a test does."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes.site import LOOK, PATIENCE, Site, wait_until

from pier_node.config.run import load
from pier_node.identity.node import Token
from pier_node.wire.transport import Transport

CORPUS = Path(argparse.__file__)
"""A hundred kilobytes of text that every machine has."""
ENDLESS = {"total_steps": 1_000_000}
"""Inner steps of a run that is ended by stopping it: on a fast machine a short one might be over too soon."""
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
NO_NAMESPACES = "not root, or no `ip` and `tc` here (Debian: iproute2): a slow line between two hosts is NOT tested"
BAD_SIGNS = ("Traceback", "never retrieved", "never awaited", "Unclosed", "was destroyed but it is pending")


class Run:
    """A run and its sites, the first of which founds it. All know its token and their identities before any starts.

    Args:
        folder: takes run.toml and the sites' folders.
        sites: how many it has at first, and run.sites.
        twin: a run whose sites' identities the sites of this one take over.
        transport: how they are connected.
        tables: of run.toml, by name; the rest is that of `tiny`.
    """

    def __init__(
        self,
        folder: Path,
        sites: int,
        twin: Run | None = None,
        transport: Transport = "grpc",
        **tables: dict[str, Any],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "run.toml"
        self.path.write_text(toml(tiny(sites, tables)))
        self.token = Token.new(load(self.path).hash())
        self.sites: list[Site] = []
        self._folder, self._transport = folder, transport
        for name in NAMES[:sites]:
            if twin:
                (folder / name).mkdir()
                shutil.copy(twin._folder / name / "node.key", folder / name)
            self.add(name)

    def add(self, name: str, *options: str) -> Site:
        """One more site. The first founds the run, the others join it."""
        way = ["--peers", self.sites[0].address] if self.sites else ["--run", str(self.path)]
        more = ["--token", str(self.token), "--dataset", str(CORPUS), "--shared-data", *options]
        site = Site(self._folder / name, *way, *more, transport=self._transport)
        self.sites.append(site)
        return site

    @property
    def apart(self) -> bool:
        """Whether its sites have states of their own."""
        return load(self.path).outer.algorithm == "noloco"

    @property
    def by_node(self) -> list[Site]:
        """The sites in node-id order: the first is the leader."""
        return sorted(self.sites, key=lambda site: site.node)

    def start(self) -> None:
        """Start all sites at once."""
        for site in self.sites:
            site.start()

    def finish(self, within: float = PATIENCE) -> None:
        """Wait until all sites are done with the run."""
        for site in self.sites:
            assert site.ended(within) == 0, f"{site} failed"
        assert all(str(self.token) not in site.output for site in self.sites), "a log has the token"
        finals = {site.digests()[site.events()[-1]["rounds"]] for site in self.sites}
        assert len(finals) == 1 or self.apart

    def stop(self) -> None:
        """Have all sites leave politely, one after the other."""
        for site in self.sites:
            assert site.stop() == 0, f"{site} failed"

    def check(self) -> None:
        """No two sites ever committed different bits, but for pairs, and nobody logged what only a programmer reads."""
        check_sites(self.sites, self.apart)


def check_sites(sites: Sequence[Site], apart: bool) -> None:
    """What must hold for the sites of a run; `apart`: they have states of their own."""
    by_round: dict[int, set[str]] = {}
    for site in sites:
        for event in site.events():
            by_round.setdefault(event["round"], set()).add(event["digest"])
    forks = [number for number, digests in by_round.items() if len(digests) > 1]
    assert not forks or apart, f"forked at {forks}"
    for site in sites:
        for sign in BAD_SIGNS:
            before, found, after = site.output.partition(sign)
            assert not found, f"{site} printed: …{before[-300:]}{sign}{after[:3000]}"


Found = Callable[..., Run]
"""The fixture: (sites, twin, tables) -> a run of this test's."""


@contextmanager
def held(sites: Sequence[Site]) -> Iterator[None]:
    """Hold these sites' workers meanwhile, so that a run waits for what a test does, and leaves it the machine.

    All are held in the inner steps for the same round: who has done them would go on without the others after a while.
    """
    for site in sites:
        site.hold()
    while not are_together(sites):
        for site in sites:
            site.release()
        time.sleep(LOOK)
        for site in sites:
            site.hold()
    yield
    for site in sites:
        site.release()


def are_together(sites: Sequence[Site]) -> bool:
    """Whether these sites, whose workers are held, are in the inner steps for the same round."""
    seen: list[dict[str, Any]] = []

    def settled() -> bool:
        seen[:] = [site.status() for site in sites]
        return all(status.get("phase") in ("training", "waiting", "catching up") for status in seen)

    wait_until("held sites come to rest", settled)
    return len({(status["phase"], status["round"]) for status in seen} | {("training", seen[0]["round"])}) == 1


def tiny(sites: int, tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables of a run of the smallest model, with those given laid over them."""
    plain: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "sites": sites},
        "model": {"preset": "llama-tiny"},
        "data": {"source": "text", "path": "each site says where"},
        "inner": {"total_steps": 100, "batch_size": 2, "eval_every": 0},
        "outer": {"algorithm": "diloco", "inner_steps": 10},
    }
    return {name: {**plain.get(name, {}), **tables.get(name, {})} for name in {**plain, **tables}}


def toml(tables: dict[str, dict[str, Any]]) -> str:
    """TOML of plain tables; its plain values are written as JSON's are."""
    return "\n".join(
        line
        for name, keys in tables.items()
        for line in (f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in keys.items()))
    )
