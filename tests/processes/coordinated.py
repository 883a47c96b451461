"""A run with a coordinator under test: `pier-coordinator start` in a process of its own, and sites that it invites."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from processes.run import CORPUS, tiny, toml
from processes.site import ENVIRONMENT, Site, free_port, wait_until

from pier_node.wire.transport import Transport

PROGRAM = Path(sys.executable).with_name("pier-coordinator")
NAMES = ("alpha", "beta", "gamma")


class Coordinated:
    """A coordinator and its sites; the addresses of both last over restarts."""

    def __init__(self, folder: Path, sites: int, transport: Transport, tables: dict[str, dict[str, Any]]) -> None:
        self.folder, self._log = folder / "coordinator", folder / "coordinator.log"
        self.folder.mkdir(parents=True)
        (self.folder / "run.toml").write_text(toml(tiny(sites, tables)))
        self.address, self.page = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self.sites = [Site(folder / name, transport=transport) for name in NAMES[:sites]]

    def start(self) -> None:
        """Run it, until it answers."""
        command = [str(PROGRAM), "start", str(self.folder), "--listen", self.address, "--page", self.page]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT)
        wait_until(f"the coordinator answers\n{self.output}", lambda: bool(self.get("/healthz")))

    def end(self, number: Signals) -> int:
        """End it; returns the exit code."""
        assert self._process
        self._process.send_signal(number)
        return self._process.wait(15.0)

    def say(self, *words: str) -> str:
        """What a command of the operator's prints."""
        command = [str(PROGRAM), words[0], "--data", str(self.folder), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def invite_all(self) -> None:
        """Start all sites with invites of their own."""
        for site in self.sites:
            made = json.loads(self.say("invite", "--name", site.name, "--json"))
            words = made["command"].split()
            assert words[:2] == ["pier-node", "start"]
            site.command += [*words[2:], "--dataset", str(CORPUS)]
            site.start()

    def get(self, path: str) -> dict[str, Any]:
        """What the page shows; {} while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.page}{path}", timeout=5.0) as answer:
                return dict(json.load(answer))
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

    @property
    def output(self) -> str:
        """All that it printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        """End everything."""
        for site in self.sites:
            site.kill()
        if self._process and self._process.poll() is None:
            self.end(SIGKILL)


@contextmanager
def coordinated(
    folder: Path, sites: int, transport: Transport = "grpc", **tables: dict[str, Any]
) -> Iterator[Coordinated]:
    """A coordinator that runs, and sites that it has invited."""
    run = Coordinated(folder, sites, transport, tables)
    try:
        run.start()
        run.invite_all()
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
        assert site.ended(30.0) == 0
    assert run.end(SIGTERM) == 0
