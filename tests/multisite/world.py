"""A world under test: sites on links of their own, and, if wanted, a coordinator. Scenarios speak with this.

    def test_a_site_dies(world: MakeWorld) -> None:
        run = world({"a": 20, "b": 50, "c": 200}, coordinator=True, outer={"algorithm": "pier"})
        run.start()
        run["a"].reach(3)
        run["b"].kill()

A site is a Site of tests/processes/site.py: `start`, `kill`, `stop`, `status`, `events`, `output`, `reach`, `rejoin`,
and all else work as there; so does the coordinator (coordinated.py). Links have rates for what a site sends.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from multisite.places import LinkedPlace
from processes.coordinated import Coordinator
from processes.run import CORPUS, check_sites, tiny, toml
from processes.site import Site

from pier_node.config.run import RunConfig, load
from pier_node.identity.node import Token

COORDINATOR = "coordinator"
RATES = {"a": 20.0, "b": 50.0, "c": 200.0}
"""Three unequal uplinks, in Mbit/s."""


class World:
    """Sites that are not started yet, and a coordinator.

    Args:
        folder: takes run.toml, the corpus and the folders of all.
        places: for all sites, in the order of `rates`, then one for the coordinator, if there is to be one.
        rates: Mbit/s of each site's uplink, by name. Without a coordinator the first site founds the run.
        options: more options of `pier-node start`, by site.
        tables: of run.toml, by name; the rest is that of `tiny`.
    """

    def __init__(
        self,
        folder: Path,
        places: Sequence[LinkedPlace],
        rates: Mapping[str, float],
        options: Mapping[str, Sequence[str]],
        tables: dict[str, dict[str, Any]],
    ) -> None:
        self.places = {place.name: place for place in places}
        self.reshape(**rates)
        shutil.copy(CORPUS, corpus := folder / "corpus.txt")
        self._run = folder / "run.toml"
        self._run.write_text(toml(tiny(len(rates), tables)))
        self.sites = {
            name: Site(folder / name, "--dataset", str(corpus), *options.get(name, ()), place=self.places[name])
            for name in rates
        }
        self._coordinator: Coordinator | None = None
        self._cut: list[tuple[LinkedPlace, list[str]]] = []
        if COORDINATOR in self.places:
            self._coordinator = Coordinator(folder / COORDINATOR, tiny(len(rates), tables), self.places[COORDINATOR])

    def begin(self) -> None:
        """Start the coordinator, if there is one, and give each site's command what brings it in."""
        if self._coordinator:
            self._coordinator.start()
            for site in self.sites.values():
                self._coordinator.invite(site)
            return
        token = Token.new(load(self._run).hash())
        founder, *others = self.sites.values()
        founder.command += ["--run", str(self._run), "--token", str(token)]
        for site in others:
            site.command += ["--peers", founder.address, "--token", str(token)]

    def __getitem__(self, name: str) -> Site:
        return self.sites[name]

    @property
    def config(self) -> RunConfig:
        """Of the run."""
        return load(self._run)

    @property
    def coordinator(self) -> Coordinator:
        """Only of a world that was made with one."""
        assert self._coordinator
        return self._coordinator

    def start(self, *names: str) -> None:
        """Start these sites, or all."""
        for name in names or self.sites:
            self[name].start()

    def reach(self, round: int, *names: str) -> None:
        """Wait until these sites, or all, have committed a round."""
        for name in names or self.sites:
            self[name].reach(round)

    def others_go_on(self, victim: Site, rounds: int = 2) -> None:
        """Wait until all but one have committed some more rounds."""
        others = [name for name, site in self.sites.items() if site is not victim]
        self.reach(max(self[name].round for name in others) + rounds, *others)

    def told(self, text: str) -> bool:
        """Whether the operator can read this among the events, or in what the sites logged."""
        return any(text in body["text"] for _, kind, _, body in self.coordinator.facts() if kind in ("event", "note"))

    def say(self, name: str, *words: str) -> str:
        """What a command of pier-node's, such as `status --json`, prints at a site."""
        site = self[name]
        command = site.place.aside("pier-node", words[0], "--data", str(site.folder), *words[1:])
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # --- its links -----------------------------------------------------------------------------

    def reshape(self, **rates: float) -> None:
        """Give the uplinks of sites other rates, in Mbit/s."""
        for name, mbit in rates.items():
            self.places[name].shape(mbit)

    def sent(self, name: str) -> int:
        """Bytes that left by a site's uplink since it was first shaped, as the kernel counts them: all layers' own."""
        return self.places[name].sent()

    def cut(self, *names: str, off: Sequence[str] = ()) -> None:
        """Cut these off from those, or from all others, both ways. Packets are lost without a word."""
        assert not self._cut, "heal first"
        inside = [self.places[name] for name in names]
        outside = [it for name, it in self.places.items() if it not in inside and (not off or name in off)]
        for here, there in ((inside, outside), (outside, inside)):
            self._cut += [(place, [other.address for other in there]) for place in here]
        for place, addresses in self._cut:
            place.lose(addresses)

    def heal(self) -> None:
        """Join again what was cut."""
        for place, addresses in self._cut:
            place.find(addresses)
        self._cut.clear()

    # --- its end -------------------------------------------------------------------------------

    def kill(self) -> None:
        """End everything by force."""
        for site in self.sites.values():
            site.kill()
        if self._coordinator:
            self._coordinator.kill()

    def check(self) -> None:
        """Nothing forked, and nobody logged what only a programmer reads."""
        check_sites([*self.sites.values()], load(self._run).outer.algorithm == "noloco")
        if self._coordinator:
            assert "Traceback" not in self._coordinator.output

    def tails(self) -> str:
        """The ends of what all printed."""
        coordinator = self._coordinator.output if self._coordinator else ""
        return "\n".join([coordinator, *(site.tail() for site in self.sites.values())])


class MakeWorld(Protocol):
    """The fixture `world`."""

    def __call__(
        self,
        rates: Mapping[str, float],
        coordinator: bool = False,
        options: Mapping[str, Sequence[str]] | None = None,
        **tables: dict[str, Any],
    ) -> World: ...
