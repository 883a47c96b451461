"""docker/compose.yaml: one command, and three sites train over shaped links; another one, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from multisite.containers import docker_answers
from processes.hosts import sh
from processes.site import wait_until

from bench.ports import free_port
from pier_node.rounds.folder import EVENTS_FILE, read_events

pytestmark = pytest.mark.multisite

FILE = Path(__file__).parents[2] / "docker" / "compose.yaml"
SITES = ("site-a", "site-b", "site-c")
NO_COMPOSE = "no Docker engine, or no docker-compose (Debian: docker.io, docker-compose): compose.yaml is NOT tested"
BUSY = 300.0
"""Seconds within which a round or a start comes where other tests run on the same two cores."""


class Project:
    """What `docker compose up` makes, under a name of its own."""

    def __init__(self, program: str) -> None:
        self.name, self._page = f"pier-compose-{os.getpid()}", free_port()
        self._command = [*program.split(), "--project-name", self.name, "--file", str(FILE)]

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of compose's; its exit code is the caller's to judge."""
        environment = {**os.environ, "PIER_PAGE": str(self._page)}
        return subprocess.run(
            [*self._command, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUSY,
            env=environment,
        )

    def do(self, *words: str) -> str:
        """Run one that must succeed."""
        done = self.say(*words)
        assert done.returncode == 0, f"{words}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def page(self, path: str) -> dict[str, Any]:
        """What the coordinator's page shows; {} while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._page}{path}", timeout=10) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return {}

    def status(self, site: str) -> dict[str, Any]:
        """What a site says of itself."""
        return dict(json.loads(self.do("exec", "-T", site, "pier-node", "status", "--json")))

    def rounds(self) -> dict[str, int]:
        """The last round of each site, as the page knows it."""
        return {row["name"]: row["round"] for row in self.page("/api/nodes").get("sites", [])}

    def reach(self, round: int, *sites: str) -> None:
        """Wait until these sites have committed a round."""

        def reached() -> bool:
            rounds = self.rounds()
            return all(rounds.get(site, 0) >= round for site in sites)

        wait_until(f"{sites} commit round {round}", reached, BUSY)

    def digests(self, site: str) -> dict[int, str]:
        """What a site held after each round that it committed."""
        written = self.do("exec", "-T", site, "cat", f"pier-data/{EVENTS_FILE}").encode()
        return {event["round"]: event["digest"] for event in read_events(written) if event["round"]}

    def is_healthy(self, service: str) -> bool:
        """Whether the engine says so."""
        container = self.do("ps", "-q", service).strip()
        return sh(f"docker inspect --format {{{{.State.Health.Status}}}} {container}").strip() == "healthy"

    def left(self) -> str:
        """Containers, volumes and networks of this project that are there."""
        mine = f"--quiet --filter label=com.docker.compose.project={self.name}"
        return "".join(sh(f"docker {what} {mine}") for what in ("ps --all", "volume ls", "network ls"))


@pytest.fixture
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    """It is not up yet; nothing of it is left afterwards."""
    newer = (
        shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    )
    if not docker_answers() or not (newer or shutil.which("docker-compose")):
        pytest.skip(NO_COMPOSE)
    request.getfixturevalue("image")
    made = Project("docker compose" if newer else "docker-compose")
    failures = request.session.testsfailed
    try:
        yield made
    finally:
        if request.session.testsfailed > failures:
            print(made.say("logs", "--no-color", "--tail", "40").stdout)
        made.do("down", "--volumes")


def test_three_sites_in_containers_train_and_take_back_one(project: Project) -> None:
    project.do("up", "--detach")
    project.reach(3, *SITES)
    assert project.page("/healthz")["ok"] is True
    assert set(project.rounds()) == {*SITES}
    assert all(len(project.status(site)["peers"]) == len(SITES) - 1 for site in SITES)
    for service in ("coordinator", *SITES):
        wait_until(f"{service} is healthy", partial(project.is_healthy, service), BUSY)
    assert "rate 20Mbit" in project.do("exec", "-T", "link-a", "tc", "qdisc", "show")
    project.do("exec", "-T", "link-a", "shape", "40mbit")
    assert "rate 40Mbit" in project.do("exec", "-T", "link-a", "tc", "qdisc", "show")
    assert project.say("exec", "-T", "site-a", "shape", "1gbit").returncode != 0

    project.do("kill", "site-c")
    project.reach(project.rounds()["site-a"] + 2, "site-a", "site-b")
    project.do("start", "site-c")
    back = project.rounds()["site-a"] + 2
    project.reach(back, *SITES)
    wait_until("site-c commits with the others again", lambda: max(project.digests("site-c")) >= back, BUSY)

    first, *others = map(project.digests, SITES)
    for digests in others:
        both = first.keys() & digests.keys()
        assert min(both) < back <= max(both)
        assert all(first[round] == digests[round] for round in both)

    project.do("down", "--volumes")
    assert project.left() == ""
