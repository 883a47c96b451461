"""A run with a coordinator under test: `pier-coordinator start` in a process of its own, and sites that it invites."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from processes.place import HERE, Place
from processes.program import ENVIRONMENT, Program
from processes.run import CORPUS, tiny, toml
from processes.site import LEAVING, Site, wait_until

from pier_node.wire.transport import Transport

NAMES = ("alpha", "beta", "gamma")


class Coordinator(Program):
    """`pier-coordinator start` in a process of its own; its addresses last over restarts.

    Args:
        folder: its folder, made here.
        tables: its run.toml.
        place: where it runs.
    """

    def __init__(self, folder: Path, tables: dict[str, dict[str, Any]], place: Place = HERE) -> None:
        super().__init__(folder, place)
        self.folder.mkdir(parents=True)
        (self.folder / "run.toml").write_text(toml(tables))
        self.address, self.page = (f"{place.address}:{place.port(usual)}" for usual in (7790, 7780))

    def start(self) -> None:
        """Run it, until it answers."""
        own = ["--listen", self.address, "--page", self.page]
        self.launch(self.place.command("pier-coordinator", "start", str(self.folder), *own))
        wait_until(f"the coordinator answers\n{self.output}", lambda: bool(self.get("/healthz")))

    def end(self, number: Signals) -> int:
        """End it; returns the exit code."""
        assert self._process
        self.daemon.send_signal(number)
        return self._process.wait(LEAVING)

    def kill(self) -> None:
        """End it by force, if it runs."""
        if self.running:
            self.end(SIGKILL)

    def say(self, *words: str) -> str:
        """What a command of the operator's prints."""
        command = self.place.aside("pier-coordinator", words[0], "--data", str(self.folder), *words[1:])
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def invite(self, site: Site) -> None:
        """Have a site's command bring it in by an invite of its own."""
        made = json.loads(self.say("invite", "--name", site.name, "--json"))
        words = made["command"].split()
        assert words[:2] == ["pier-node", "start"]
        assert made["token"] not in words
        file = site.folder.with_suffix(".token")
        file.write_text(made["token"])
        site.command += [*words[2:], "--token-file", str(file)]

    def get(self, path: str) -> dict[str, Any]:
        """What the page shows; {} while it does not answer."""
        try:
            return dict(json.loads(self.place.get(f"http://{self.page}{path}")))
        except (OSError, ValueError):
            return {}

    def state(self, site: Site) -> str:
        """What it says of a site."""
        rows = {row["node"]: row["state"] for row in self.get("/api/nodes").get("sites", [])}
        return str(rows.get(site.node, ""))

    def facts(self) -> list[tuple[int, str, str, dict[str, Any]]]:
        """What is in its database: number, kind, node, body."""
        with closing(sqlite3.connect(f"file:{self.folder}/coordinator.db?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT number, kind, node, body FROM facts ORDER BY number").fetchall()
        return [(number, kind, node, json.loads(body)) for number, kind, node, body in rows]

    def rounds(self, site: Site) -> list[int]:
        """The rounds of a site that are in its database."""
        return [body["round"] for _, kind, node, body in self.facts() if (kind, node) == ("round", site.node)]


class Coordinated(Coordinator):
    """A coordinator and its sites."""

    def __init__(self, folder: Path, sites: int, transport: Transport, tables: dict[str, dict[str, Any]]) -> None:
        super().__init__(folder / "coordinator", tiny(sites, tables))
        self.sites = [Site(folder / name, "--dataset", str(CORPUS), transport=transport) for name in NAMES[:sites]]

    def start_sites(self) -> None:
        """Start all with invites of their own."""
        for site in self.sites:
            self.invite(site)
            site.start()

    def kill(self) -> None:
        """End everything."""
        for site in self.sites:
            site.kill()
        super().kill()


@contextmanager
def coordinated(
    folder: Path, sites: int, transport: Transport = "grpc", **tables: dict[str, Any]
) -> Iterator[Coordinated]:
    """A coordinator that runs, and sites that it has invited."""
    run = Coordinated(folder, sites, transport, tables)
    try:
        run.start()
        run.start_sites()
        yield run
        assert "Traceback" not in run.output
    except BaseException:
        print(run.output, *(site.tail() for site in run.sites), sep="\n")
        raise
    finally:
        run.kill()


def polite(run: Coordinated) -> None:
    """Everybody ends when asked to."""
    run.say("stop")
    for site in run.sites:
        assert site.ended() == 0
    assert run.end(SIGTERM) == 0
    assert "Stopped; the sites train on" in run.output
